#!/usr/bin/env bash
# The whole line on a machine without a GPU: a chat model to INT4, to a TensorRT engine for an A100, to a Triton model
# repository, to a running server that streams an answer over gRPC and HTTP, to the report of accuracy against latency.
# Needs python3 and pip. Run twice, the second time only serves and measures.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/install.sh
source scripts/install.sh

server=
stop_server() {
  if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then
    kill -TERM "$server"
    wait "$server" || true
  fi
  server=
}
trap stop_server EXIT

step() { printf '\n== %s\n' "$1"; }

began=$SECONDS
step "Build: checkpoint, INT4 weights, kernels, graph, A100 engine, model repository"
# A quarter of the recipe's calibration text: a little less exact, and done in a quarter of the time.
sits-trt build recipes/a100.yaml --set quantization.calibration.blocks=8
sits-trt engine inspect builds/a100

step "Build the fp16 reference"
sits-trt build recipes/cpu-fp16.yaml

rm -f builds/endpoints.json
step "Serve the INT4 model with the Triton Inference Server"
sits-trt serve builds/a100 --free-ports --endpoints-file builds/endpoints.json &
server=$!
for _ in $(seq 180); do
  [ ! -f builds/endpoints.json ] || break
  kill -0 "$server" 2>/dev/null || { wait "$server"; exit 1; }
  sleep 1
done
http=$(python -c 'import json; print(json.load(open("builds/endpoints.json"))["http"])')
grpc=$(python -c 'import json; print(json.load(open("builds/endpoints.json"))["grpc"])')

step "Ask it over gRPC, streamed"
sits-trt generate --url "$grpc" --build builds/a100 --max-tokens 48 "What is the capital of France?"

step "Ask it over HTTP, streamed as server-sent events"
python - "$http" <<'PY'
import json, sys, urllib.request
prompt = "<|im_start|>user\nGreet me in one short sentence.<|im_end|>\n<|im_start|>assistant\n"
body = {"text_input": prompt, "max_tokens": 24, "stream": True}
request = urllib.request.Request(f"http://{sys.argv[1]}/v2/models/ensemble/generate_stream", json.dumps(body).encode())
with urllib.request.urlopen(request, timeout=120) as answer:
    for line in answer:
        if line.startswith(b"data: "):
            print(json.loads(line[6:]).get("text_output", ""), end="", flush=True)
print()
PY
stop_server

step "Sweep: accuracy against latency, INT4 beside fp16"
sits-trt sweep builds/a100 builds/cpu-fp16 --out builds/report \
  --set sweep.concurrencies='[1, 4]' --set sweep.requests_per_level=8 --set sweep.accuracy.blocks=4 \
  --set sweep.accuracy.exact_match_tokens=64

step "Done in $((SECONDS - began)) s"
echo "engine:      $PWD/builds/a100/engine/model.engine"
echo "repository:  $PWD/builds/a100/repository"
echo "report:      $PWD/builds/report/report.html"
