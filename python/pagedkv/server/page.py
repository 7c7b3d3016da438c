"""The live page of the server: the block map, requests, queue and rates."""

from importlib.resources import files

PAGE = files("pagedkv.server").joinpath("page.html").read_text(encoding="utf-8")
