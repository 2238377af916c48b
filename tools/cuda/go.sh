#!/usr/bin/env bash
# The go command, with what the tag cuda needs in its environment:
#   tools/cuda/go.sh test -tags cuda ./device/cuda/...
set -euo pipefail
. "$(dirname "$0")/env.sh"
exec "${GO:-go}" "$@"
