import ctypes
import gc
import threading
import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch

from pagedkv.kv_cache import Tensor, append_kv, from_dlpack

TORCH_DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
]
NUMPY_DTYPES = ["float32", "float16", "int32", "int64", "uint8", "uint16"]
CPU, CUDA, CUDA_HOST = 1, 2, 3


class Producer:
    """An array that speaks one dialect of DLPack and counts what is asked of it."""

    def __init__(self, array, device=(CPU, 0)):
        self.array = array
        self.device = device
        self.requests = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.requests.append(options)
        return self.array.__dlpack__(**options)


class OldProducer(Producer):
    """A producer from before DLPack 1.0: it knows no `max_version`."""

    def __dlpack__(self, stream=None):
        self.requests.append({})
        return self.array.__dlpack__()


class DLTensor(ctypes.Structure):
    """The header of DLPack, field by field."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    """The header with its owner."""

    _fields_ = [("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", DELETER)]


class HandMade:
    """A producer of float32 counted from 0, without strides, whose header says what the test wants it to say."""

    # What a header points at must outlive the tensors that were made from it, however long those live.
    kept: ClassVar[list["HandMade"]] = []

    def __init__(self, shape, device=(CPU, 0), bits=32, byte_offset=0):
        self.deleted = 0
        self.data = np.arange(64, dtype=np.float32)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        header = DLTensor(self.data.ctypes.data, *device, len(shape), 2, bits, 1, self.shape, None, byte_offset)
        self.managed = DLManagedTensor(header, None, DELETER(self.count))
        self.kept.append(self)

    def count(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, self.managed.tensor.device_id

    def __dlpack__(self):
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_import_keeps_type_and_address_when_torch_exports(dtype):
    array = torch.zeros(2, 3).to(dtype)
    tensor = from_dlpack(array)
    assert (tensor.dtype, tensor.shape, tensor.device) == (str(dtype).removeprefix("torch."), (2, 3), "cpu")
    assert torch.from_dlpack(tensor).data_ptr() == array.data_ptr()
    assert not tensor.readonly


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_import_keeps_type_and_address_when_numpy_exports(dtype):
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    tensor = from_dlpack(array)
    assert (tensor.dtype, tensor.shape, tensor.strides) == (dtype, (2, 3), (3, 1))
    assert np.shares_memory(np.from_dlpack(tensor), array)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[1:, ::2],
        lambda a: a[:, None, 2],
        lambda a: np.broadcast_to(a[0], (4, 6)),
        lambda a: a[::-1],
        lambda a: a[2, 3, ...],
    ],
)
def test_import_keeps_strides_and_offset_when_the_array_is_a_view(view):
    array = view(np.arange(24, dtype=np.int32).reshape(4, 6))
    tensor = from_dlpack(array)
    assert tensor.strides == tuple(stride // 4 for stride in array.strides)
    np.testing.assert_array_equal(np.from_dlpack(tensor), array)


def test_import_takes_an_array_when_it_is_empty():
    assert from_dlpack(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert from_dlpack(torch.zeros(3, 0)).shape == (3, 0)


def test_import_asks_for_a_versioned_capsule_when_the_producer_knows_them():
    producer = Producer(np.zeros(3, np.float32))
    assert from_dlpack(producer).shape == (3,)
    assert producer.requests[0]["max_version"] >= (1, 0)


def test_import_asks_again_without_version_when_the_producer_knows_none():
    producer = OldProducer(np.arange(3, dtype=np.float32))
    tensor = from_dlpack(producer)
    assert np.from_dlpack(tensor).tolist() == [0, 1, 2]
    assert producer.requests == [{}]


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
def test_import_takes_a_capsule_once_when_it_is_given_directly(options):
    capsule = np.arange(3, dtype=np.float32).__dlpack__(**options)
    assert from_dlpack(capsule).shape == (3,)
    with pytest.raises(ValueError, match="already been consumed"):
        from_dlpack(capsule)


def test_import_is_readonly_when_numpy_says_so():
    array = np.zeros(3, np.float32)
    array.setflags(write=False)
    assert from_dlpack(array).readonly


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (np.uint16, "bfloat16"),
        (np.uint16, "float16"),
        (np.uint8, "float8_e4m3fn"),
        (np.uint8, "float8_e5m2"),
        (np.float32, "float32"),
    ],
)
def test_import_reads_bits_as_the_named_type_when_their_width_fits(stored, dtype):
    assert from_dlpack(np.zeros(3, stored), dtype=dtype).dtype == dtype
    assert from_dlpack(from_dlpack(np.zeros(3, stored)), dtype=dtype).dtype == dtype


@pytest.mark.parametrize(("stored", "dtype"), [(np.uint8, "bfloat16"), (np.float32, "bfloat16"), (np.int32, "float32")])
def test_import_refuses_the_named_type_when_the_bits_are_others(stored, dtype):
    message = f"obj: expected an array that can be read as {dtype}, found dtype {np.dtype(stored)}"
    with pytest.raises(TypeError, match=message):
        from_dlpack(np.zeros(3, stored), dtype=dtype)


def test_import_lists_the_types_when_the_named_one_is_unknown():
    with pytest.raises(ValueError, match=r'dtype: expected one of float32, .*, found "float7"'):
        from_dlpack(np.zeros(3, np.uint8), dtype="float7")


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (object(), TypeError, "k_cache: expected an array that speaks DLPack, found object"),
        ([1.0], TypeError, "k_cache: expected an array that speaks DLPack, found list"),
        (np.zeros(3), TypeError, "k_cache: expected dtype float32, .*, found float64"),
        (np.zeros(3, bool), TypeError, "k_cache: expected dtype .*, found bool"),
        (torch.zeros(3, dtype=torch.complex64), TypeError, "k_cache: expected dtype .*, found complex64"),
        (torch.zeros(3, requires_grad=True), ValueError, "k_cache: expected a tensor without gradient.*detach"),
        (np.zeros(3, ">f4"), ValueError, "k_cache: expected an array that gives .*, found ndarray: DLPack only supp"),
        (torch.zeros(3).to_sparse(), ValueError, "k_cache: expected an array that gives .*, found Tensor: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_import_names_the_argument_when_it_is_refused(array, error, message):
    with pytest.raises(error, match=message):
        from_dlpack(array, argument="k_cache")


def test_import_refuses_memory_when_it_is_not_aligned():
    bits = np.zeros(9, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="obj: expected memory aligned to 4 bytes"):
        from_dlpack(bits)


def test_import_passes_the_error_on_as_cause_when_a_producer_fails():
    class Broken:
        def __dlpack_device__(self):
            return CPU, 0

        def __dlpack__(self, **options):
            raise RuntimeError("the disk is on fire")

    with pytest.raises(ValueError, match="found Broken: the disk is on fire") as caught:
        from_dlpack(Broken())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_operation_names_the_device_when_memory_is_elsewhere():
    tensor = from_dlpack(np.zeros((1, 1, 8), np.float32))
    elsewhere = from_dlpack(HandMade((1, 1, 8), device=(CUDA, 3)))
    assert elsewhere.device == "cuda:3"
    with pytest.raises(ValueError, match="k: expected memory on the cpu, found device cuda:3"):
        append_kv(elsewhere, tensor, tensor, tensor, np.zeros(1, np.int64))


def test_operation_reads_page_locked_memory_when_its_device_is_cuda_host():
    pinned = from_dlpack(HandMade((1, 1, 8), device=(CUDA_HOST, 0)))
    cache = np.zeros((2, 1, 1, 2, 8), np.float32)
    append_kv(pinned, pinned, cache[0], cache[1], np.zeros(1, np.int64))
    assert cache[1, 0, 0, 0].tolist() == list(range(8))


def test_import_takes_contiguous_strides_when_there_are_none():
    tensor = from_dlpack(HandMade((2, 3, 4)))
    assert tensor.strides == (12, 4, 1)
    assert np.from_dlpack(tensor).ravel().tolist() == list(range(24))


def test_import_adds_the_byte_offset_when_there_is_one():
    assert np.from_dlpack(from_dlpack(HandMade((3,), byte_offset=8))).tolist() == [2, 3, 4]


def test_deleter_is_called_once_when_import_and_exports_are_gone():
    producer = HandMade((2, 3))
    tensor = from_dlpack(producer)
    exported = [np.from_dlpack(tensor), torch.from_dlpack(tensor), tensor.select(0, 1)]
    del tensor
    assert producer.deleted == 0
    exported.clear()
    gc.collect()
    assert producer.deleted == 1


def test_deleter_is_called_once_when_the_type_is_refused():
    producer = HandMade((2, 3), bits=64)
    with pytest.raises(TypeError, match="found float64"):
        from_dlpack(producer)
    assert producer.deleted == 1


def tracked():
    """Return an array and a weak reference that dies when its memory is let go."""
    array = np.zeros(16, np.float32).view(type("Tracked", (np.ndarray,), {}))
    return array, weakref.ref(array)


def test_memory_lives_as_long_as_the_tensor_does():
    array, alive = tracked()
    tensor = from_dlpack(array)
    del array
    gc.collect()
    assert alive() is not None
    del tensor
    gc.collect()
    assert alive() is None


def test_memory_lives_as_long_as_a_selection_or_an_export_does():
    array, alive = tracked()
    tensor = from_dlpack(array.reshape(2, 8))
    part = tensor.select(0, 1)
    exported = np.from_dlpack(part)
    del array, tensor, part
    gc.collect()
    assert alive() is not None
    del exported
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}])
def test_memory_is_let_go_when_a_capsule_is_dropped_unused(options):
    array, alive = tracked()
    capsule = from_dlpack(array).__dlpack__(**options)
    del array
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_memory_is_let_go_when_the_last_holder_is_another_thread():
    array, alive = tracked()
    held = [from_dlpack(array)]
    del array
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("options", [{}, {"max_version": (0, 8)}, {"max_version": (1, 0)}, {"max_version": (1, 3)}])
def test_export_shares_the_memory_when_either_kind_of_capsule_is_asked_for(options):
    array = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    capsule = from_dlpack(array).__dlpack__(**options)
    versioned = options.get("max_version", (0, 0)) >= (1, 0)
    assert ("dltensor_versioned" in repr(capsule)) == versioned
    exported = torch.from_dlpack(capsule)
    exported[0, 0] = 7
    assert array[0, 0] == 7


def test_export_keeps_the_type_when_the_receiver_knows_it():
    tensor = from_dlpack(np.full(2, 0x3F80, np.uint16), dtype="bfloat16")
    assert torch.from_dlpack(tensor).tolist() == [1, 1]
    assert torch.from_dlpack(tensor).dtype == torch.bfloat16


def test_export_leaves_only_versioned_when_memory_is_readonly():
    array = np.zeros(3, np.float32)
    array.setflags(write=False)
    tensor = from_dlpack(array)
    assert not np.from_dlpack(tensor).flags.writeable
    with pytest.raises(BufferError, match=r"read-only memory leaves only in a versioned capsule.*max_version=\(1, 0\)"):
        tensor.__dlpack__()


def test_export_refuses_when_a_copy_or_another_device_is_asked_for():
    tensor = from_dlpack(np.zeros(3, np.float32))
    with pytest.raises(BufferError, match="zero-copy"):
        tensor.__dlpack__(max_version=(1, 0), copy=True)
    with pytest.raises(BufferError, match="cross-device"):
        tensor.__dlpack__(max_version=(1, 0), dl_device=(CUDA, 0))
    assert tensor.__dlpack_device__() == (CPU, 0)


def test_select_drops_the_dimension_when_the_index_is_inside():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    part = from_dlpack(array).select(1, 2)
    assert (part.shape, part.strides) == ((2, 4), (12, 1))
    np.testing.assert_array_equal(np.from_dlpack(part), array[:, 2])


@pytest.mark.parametrize(
    ("axis", "index", "message"),
    [(2, 0, r"axis: 2 is not in shape \(2, 3\)"), (1, 3, "index: expected 0 to 2, found 3"), (0, -1, "found -1")],
)
def test_select_refuses_when_axis_or_index_is_outside(axis, index, message):
    with pytest.raises(IndexError, match=message):
        from_dlpack(np.zeros((2, 3), np.float32)).select(axis, index)


def test_tensor_shows_what_it_is_when_printed():
    array = np.zeros((2, 3), np.float32)
    array.setflags(write=False)
    assert repr(from_dlpack(array)) == "Tensor(shape=(2, 3), dtype=float32, device=cpu, readonly)"


def test_tensor_has_no_constructor():
    with pytest.raises(TypeError):
        Tensor()
