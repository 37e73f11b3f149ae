#!/usr/bin/env bash
# Install everything, then run every check: format, lint, types, tests. --quick leaves out the long tests.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/install.sh
source scripts/install.sh

select=()
[ "${1:-}" != --quick ] || select=(-m "not slow and not server")

ruff format --check .
ruff check .
mypy
python -m pytest tests/test_house.py tests/unit "${select[@]}"
python -m pytest tests --ignore tests/unit --ignore tests/test_house.py "${select[@]}"
