#!/usr/bin/env bash
# Build a virtual environment for one public client of OpenAI's interface, apart from the project's own.
# usage: public_client.sh guidellm|aiperf|ultralytics DIR PYTHON
#   DIR     where the environment goes; nothing is done where it is complete
#   PYTHON  the interpreter of an environment that has torch
# guidellm and ultralytics need torch. A .pth file lends them PYTHON's, which is 5 GB that nobody needs twice; what they
# install themselves comes before it.
set -euo pipefail
name=${1:?usage: public_client.sh guidellm|aiperf|ultralytics DIR PYTHON}
dir=${2:?a folder for the environment}
python=${3:?an interpreter with torch}

stamp="$dir/.complete"
[[ -e $stamp ]] && exit 0

"$python" -m venv "$dir"
lend_torch() {
    local lent own
    lent=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
    own=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$lent" >"$own/lent_torch.pth"
}

case $name in
    guidellm)
        lend_torch
        "$dir/bin/pip" install --quiet guidellm==0.8.1
        ;;
    aiperf)
        "$dir/bin/pip" install --quiet aiperf==0.13.0
        ;;
    ultralytics)
        lend_torch
        # Its whole list would bring another torch. Of torchvision it asks the version alone, unless there are images.
        "$dir/bin/pip" install --quiet --no-deps ultralytics==8.4.190 ultralytics-thop==2.2.3 torchvision
        "$dir/bin/pip" install --quiet opencv-python-headless openai matplotlib polars scipy pillow psutil pyyaml requests
        ;;
    *)
        echo "public_client.sh: expected guidellm, aiperf or ultralytics, found $name" >&2
        exit 2
        ;;
esac
touch "$stamp"
