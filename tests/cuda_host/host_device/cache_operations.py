"""The cache operations of the package, launched on the host."""

import pagedkv.kv_cache


def _launched(operation):
    def run(device, *arrays, **options):
        with device.in_place_of_gpu():
            return operation(*arrays, **options)

    return run


append_kv = _launched(pagedkv.kv_cache.append_kv)
copy_blocks = _launched(pagedkv.kv_cache.copy_blocks)
gather_kv = _launched(pagedkv.kv_cache.gather_kv)
move_kv = _launched(pagedkv.kv_cache.move_kv)
