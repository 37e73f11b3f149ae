"""The Triton model repository: configurations written through the server's own protobuf, and a checker."""

from sits_trt.repository.check import RepositoryReport as RepositoryReport
from sits_trt.repository.check import check_repository as check_repository
from sits_trt.repository.config import RepositoryPaths as RepositoryPaths
from sits_trt.repository.write import render_repository as render_repository
from sits_trt.repository.write import write_repository as write_repository
