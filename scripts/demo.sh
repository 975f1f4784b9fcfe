#!/usr/bin/env bash
# `make run`: the agent in the foreground, with a small dataset in a local directory as its source.
# Everything is below build/run. Ctrl-C ends the agent; the view stays until `make stop`. The terminal shows progress;
# the agent's log goes to a file, and its end is shown when the agent fails.
set -euo pipefail
cd "$(dirname "$0")/.."
here=$PWD/build/run
port=${NODEAGENT_PORT:-9470}
socket=$here/admin.sock
[ ${#socket} -le 107 ] || socket=/run/nodeagent/demo.sock  # a socket's path is short
mkdir -p "$here"
if [ "$(id -u)" != 0 ]; then
  echo "make run: needs root (it mounts the view); try: sudo make run" >&2
  exit 4
fi

if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
  echo "make run: another program has port $port; try: NODEAGENT_PORT=$((port + 10)) make run" >&2
  exit 4
fi

source=${NODEAGENT_SOURCE:-$here/source}
if [ "$source" = "$here/source" ] && [ ! -e "$source/.made" ]; then
  echo "making a small dataset to cache: $source"
  .venv/bin/python scripts/demo_dataset.py "$source"
fi
cat >"$here/nodeagent.yaml" <<Y
admin: {socket: "$socket", metrics: "127.0.0.1:$port"}
state_dir: "$here/state"
cache:
  store: "$here/store"
  views: "$here/views"
  budget: 20GiB
  reserve: 5%
  datasets:
    - {name: demo, source: {kind: dir, path: "$source"}, freshness: frozen, warm: true}
Y
cat <<T

  source     $source
  settings   $here/nodeagent.yaml
  log        $here/agent.log
  read at    $here/views/demo/data      (what a training job would read)
  status     http://127.0.0.1:$port/     metrics: /metrics
  in another shell:
             .venv/bin/nodeagent --config $here/nodeagent.yaml dataset list
             .venv/bin/nodeagent --config $here/nodeagent.yaml dataset warm demo --wait
  Ctrl-C ends the agent; the kernel still serves the view. 'make stop' takes it down.

T
.venv/bin/nodeagent --config "$here/nodeagent.yaml" run >"$here/agent.log" 2>&1 &
agent=$! asked=
trap 'asked=1; kill -TERM $agent 2>/dev/null' INT TERM
.venv/bin/python scripts/wait_api.py "http://127.0.0.1:$port" "$agent" &&
  .venv/bin/nodeagent --config "$here/nodeagent.yaml" dataset warm demo --wait || true
while kill -0 $agent 2>/dev/null; do wait $agent || true; done  # a signal to us ends a wait
status=0
wait $agent || status=$?
if [ "$status" != 0 ] && [ -z "$asked" ]; then
  echo "make run: the agent ended with $status; the end of $here/agent.log:" >&2
  tail -n 5 "$here/agent.log" >&2
fi
exit $status
