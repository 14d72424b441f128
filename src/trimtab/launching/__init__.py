"""Launch a plan: torchrun, Slurm, Kubernetes, SkyPilot, accelerate and deepspeed."""
