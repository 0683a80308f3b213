#!/bin/bash
# A run on several nodes: sbatch docs/slurm.sh RECIPE [key=value ...], from the repository's root.
#
# Ten minutes before the job's time is over, and when the job is preempted, SLURM sends SIGTERM to the processes. They
# finish the optimiser step at hand, write a checkpoint together and exit with 143; then the job is queued again and goes
# on from there. Lightning's handler of SIGUSR1 is not used: it writes in the midst of a step, where the processes are
# not at the same place, and of a sharded model they can write together only.
#SBATCH --job-name=pod
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -u

# One task is one process of the run; Lightning reads rank, world size and address from SLURM.
srun "${PYTHON:-.venv/bin/python}" -m pod.fit "recipe=$1" "${@:2}" resume=auto \
    "trainer.num_nodes=$SLURM_NNODES" "trainer.devices=$SLURM_NTASKS_PER_NODE"
code=$?
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
