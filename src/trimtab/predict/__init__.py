"""From traces and facts to estimates: pure sums."""
