#!/bin/bash
# One process per GPU on two nodes, from the root of the repository:
#
#   sbatch examples/launch/slurm.sh --steps 1000
#
# A job that is cancelled or requeued goes on from its last checkpoint, on any number of nodes.

#SBATCH --job-name=emopt-multihost
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
# For the node, not for the task: JAX picks the GPU of its local rank itself, and has to see all of them.
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=multihost-%j.log

set -euo pipefail

# A proxy would be asked for the coordinator too.
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY

# JAX reads the number of processes and the coordinator's address from what srun sets. The folder must be on a file
# system that all nodes share. One process that fails ends all others.
srun --kill-on-bad-exit=1 --label python -u examples/08_multihost.py --out "${OUT:-runs/multihost}" "$@"
