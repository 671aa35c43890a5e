# shellcheck shell=bash
# Steps with a deadline, and one summary of them. Sourced by launch/test and launch/gpu-check, which set
# pytest_args; after lib/env.sh.

# Seconds for one step: only against a hang after its last test. Each test has a deadline of its own, so a step that is
# slow on a busy machine takes longer, and passes.
deadline=10800
logs=$(mktemp -d)
step=
trap 'rm -rf -- "$logs"' EXIT
declare -A lanes=() # the processes of those in the background, by name
# A step is in a process group of its own (timeout makes it), where Ctrl-C does not reach it.
interrupted() {
  [[ -z $step ]] || kill "$step"
  for lane in "${lanes[@]}"; do kill "$lane" 2>/dev/null || true; done
  exit 130
}
trap interrupted HUP INT TERM

rows=() total_passed=0 total_failed=0 total_skipped=0

# run NAME COMMAND...: sets $status and $seconds. The output goes through a file, so that a stray
# process that holds it open cannot keep us waiting. bash has background jobs ignore Ctrl-C, which
# tests send to themselves: the trap undoes that.
run() {
  local start=$SECONDS
  printf '\n--- %s\n' "$1"
  rm -f -- "$logs/report.xml"
  : >"$logs/output"
  (
    trap - INT QUIT
    exec timeout -k 10 "$deadline" "${@:2}" </dev/null >"$logs/output" 2>&1
  ) &
  step=$!
  tail -n +1 -f -s 0.2 --pid="$step" "$logs/output" &
  status=0
  wait "$step" || status=$?
  step=
  wait $! || true
  seconds=$((SECONDS - start))
}

# record NAME PASSED FAILED SKIPPED: one row of the summary.
record() {
  local result=PASS note="$2 passed, $3 failed, $4 skipped"
  if (($3)); then result=FAIL; fi
  if ((status)); then note+=" (exit status $status)"; fi
  if ((status == 124 || status == 137)); then note+=" stopped at the deadline"; fi
  rows+=("$(printf '%-26s %-6s %7d   %s' "$1" "$result" "$seconds" "$note")")
  total_passed=$((total_passed + $2))
  total_failed=$((total_failed + $3))
  total_skipped=$((total_skipped + $4))
}

# check NAME COMMAND...: a step that counts as one test.
check() {
  run "$@"
  record "$1" $((status == 0)) $((status != 0)) 0
}

# tests NAME COMMAND...: a step of pytest, which leaves rank 0's report in $logs/report.xml.
tests() {
  local errors failures skipped all failed passed
  run "$@"
  # About once in a hundred times Open MPI's launcher fails to start, before any rank has started.
  if ((status)) && [[ ! -e $logs/report.xml ]] && grep -q "listener thread failed to start" "$logs/output"; then
    run "$@"
  fi
  read -r errors failures skipped all <<<"$(
    sed -nE 's/.*<testsuite [^>]*errors="([0-9]+)" failures="([0-9]+)" skipped="([0-9]+)" tests="([0-9]+)".*/\1 \2 \3 \4/p' \
      "$logs/report.xml" 2>/dev/null
  )"
  [[ -n $all ]] || errors=1 failures=0 skipped=0 all=1 # no report at all
  failed=$((errors + failures))
  passed=$((all - failed - skipped))
  # 5: no test was selected, which is fine if the caller has selected them.
  # shellcheck disable=SC2154
  if ((status == 5 && ${#pytest_args[@]})); then status=0; fi
  # A rank that fails or dies alone is not in rank 0's report.
  if ((status && !failed)); then failed=1; fi
  record "$1" "$passed" "$failed" "$skipped"
}

# ranks MPI MPIRUN PYTHON N MARKERS [IMPLEMENTATION [HAND]]: the tests with MARKERS on N ranks, with IMPLEMENTATION as
# the meaning of AUTO for reductions; with HAND (K/N) only the cases that --deal gives to it. Without colours: Open
# MPI gives each rank a terminal, so pytest would use them.
ranks() {
  # shellcheck disable=SC2016 # each rank expands it: only rank 0 writes the report
  local program='case ${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}} in 0) set -- "$@" "--junitxml=$0" ;; esac; exec "$@"'
  # Open MPI names its shared memory by 16 bits of the job, and hundreds of jobs start beside this one: with the same
  # name, one would overwrite the memory of the other, and the ranks of both crash.
  local memory
  memory=$(mktemp -d -p /dev/shm ranks.XXXXXX)
  tests "$1, ranks: $4${6:+, $6}" env PATH="${3%/*}:$PATH" PY_COLORS=0 MPIDIST_IMPLEMENTATION="${6:-}" \
    OMPI_MCA_btl_sm_backing_directory="$memory" "$2" -n "$4" bash -c "$program" "$logs/report.xml" \
    "$3" -m pytest -p no:cacheprovider --with-mpi -m "$5" ${7:+--deal="$7"} "${pytest_args[@]}"
  rm -rf -- "$memory"
}

# lane NAME COMMAND...: run steps in the background, beside others. Its output and its rows are shown by `join`.
lane() {
  mkdir -- "$logs/$1"
  in_lane "$@" >"$logs/$1.output" 2>&1 &
  lanes[$1]=$!
}

# What `lane` runs, in a process of its own.
in_lane() {
  logs+=/$1 step='' rows=() total_passed=0 total_failed=0 total_skipped=0
  lanes=()
  trap interrupted HUP INT TERM
  "${@:2}"
  declare -p rows total_passed total_failed total_skipped >"$logs/rows"
}

# join NAME: wait for a lane, show its output, and take over its rows. One that ended early has failed.
join() {
  local ended=0 before=("${rows[@]}") passed=$total_passed failed=$total_failed skipped=$total_skipped
  wait "${lanes[$1]}" || ended=$?
  unset "lanes[$1]"
  cat -- "$logs/$1.output"
  status=$ended seconds=0
  if ((ended)) || [[ ! -e $logs/$1/rows ]]; then
    record "$1" 0 1 0
    return
  fi
  # shellcheck disable=SC1090 # written by `lane`: here as plain assignments
  source <(sed 's/^declare -[-a] //' "$logs/$1/rows")
  rows=("${before[@]}" "${rows[@]}")
  total_passed=$((passed + total_passed))
  total_failed=$((failed + total_failed))
  total_skipped=$((skipped + total_skipped))
}

# summary: the table, and as the last line pytest's closing line for the whole, a check being one test
# (CI reads it). Fails if a step did.
summary() {
  printf '\n%-26s %-6s %7s\n' step result seconds
  printf '%s\n' "${rows[@]}"
  printf '%-33s %7d\n' "all, some side by side" "$SECONDS"
  printf '\n%d passed, %d failed, %d skipped\n' "$total_passed" "$total_failed" "$total_skipped"
  ((total_failed == 0))
}
