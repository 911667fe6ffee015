#!/bin/sh
# The browser in which the tests open the pages of `dbo-greenlet show --html`: Debian's chromium with its driver.
# Does nothing where both are there. Where they cannot be installed it says why and succeeds all the same: the tests
# that need a browser are then skipped, with that reason.
set -u

have() {
    command -v "$1" >/dev/null 2>&1
}

without() {
    echo "browser: $1; the tests of pages will be skipped"
    exit 0
}

if have chromedriver && { have chromium || have chromium-browser || have google-chrome; }; then
    echo "browser: already there"
    exit 0
fi

have apt-get || without "no apt-get on this machine; install chromium and chromedriver to have them"

as_root=
if [ "$(id -u)" != 0 ]; then
    # -n: a stage of CI cannot type a password.
    have sudo && sudo -n true 2>/dev/null || without "neither root nor sudo without a password"
    as_root="sudo -n"
fi

log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
echo "browser: installing chromium and chromium-driver with apt-get"
# Lists may be old or missing on a fresh machine. That some source of them fails is no reason not to try.
$as_root apt-get update >"$log" 2>&1 || true
if ! $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium chromium-driver \
    >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    without "apt-get could not install it (its last words are above)"
fi
have chromedriver || without "apt-get installed it, but there is no chromedriver on the path"
echo "browser: $(chromedriver --version | cut -d' ' -f1-2) installed"
