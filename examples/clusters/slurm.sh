#!/bin/sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=24:00:00

# Starts each rank of a script by Slurm: sbatch slurm.sh train.py ARGUMENTS. The home folder is one that all nodes have.
# LIBDC_LAUNCHER lets the ranks meet over TCP; without it, `srun --mpi=pmix` or `pmi2` lets them meet over MPI.
set -eu
umask 077
export LIBDC_LAUNCHER=slurm
export LIBDC_SECRET_FILE="$HOME/.libdc-secret.$SLURM_JOB_ID" # the file's name alone is in Slurm's records
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
openssl rand -hex 32 >"$LIBDC_SECRET_FILE"
trap 'rm -f "$LIBDC_SECRET_FILE"' EXIT
srun --kill-on-bad-exit=1 python "$@"
