"""From a plan to text and processes: torchrun, Slurm, Kubernetes, SkyPilot, and other people's launchers."""
