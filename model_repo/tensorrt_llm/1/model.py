"""Model 'tensorrt_llm': the code is sits_trt.serving.bodies.tensorrt_llm."""

import os
import site

# 'sits-trt serve' names the site directories here, for a server whose own interpreter is not that of sits-trt.
for directory in filter(None, os.environ.get("SITS_TRT_SITE", "").split(os.pathsep)):
    site.addsitedir(directory)

from sits_trt.serving.bodies.tensorrt_llm import TritonPythonModel as TritonPythonModel  # noqa: E402
