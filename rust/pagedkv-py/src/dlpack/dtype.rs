//! Element types between `DLPack` and the operations.

use dlpark::ffi::{DLDataType, DLDataTypeCode};
use pagedkv_cpu::DType;

const BFLOAT16: DLDataType = DLDataType::scalar(DLDataTypeCode::BFLOAT, 16);
const FLOAT16: DLDataType = DLDataType::scalar(DLDataTypeCode::FLOAT, 16);

/// The element type of a descriptor, if the operations know it.
pub(super) fn from_dlpack(dtype: DLDataType) -> Option<DType> {
    DType::ALL.into_iter().find(|known| to_dlpack(*known) == dtype)
}

/// The descriptor of an element type.
pub(super) fn to_dlpack(dtype: DType) -> DLDataType {
    match dtype {
        DType::F32 => DLDataType::F32,
        DType::F16 => FLOAT16,
        DType::BF16 => BFLOAT16,
        DType::F8E4M3 => DLDataType::F8E4M3FN,
        DType::F8E5M2 => DLDataType::F8E5M2,
        DType::I32 => DLDataType::I32,
        DType::I64 => DLDataType::I64,
        DType::U8 => DLDataType::U8,
        DType::U16 => DLDataType::U16,
    }
}

/// Whether an array of `stored` may be read as `wanted`: the same type, or the unsigned integer of its width.
pub(super) fn reads_as(stored: DType, wanted: DType) -> bool {
    match wanted {
        DType::F16 | DType::BF16 => stored == wanted || stored == DType::U16,
        DType::F8E4M3 | DType::F8E5M2 => stored == wanted || stored == DType::U8,
        _ => stored == wanted,
    }
}

/// The name that torch and `NumPy` users know, also for types that no operation takes.
pub(super) fn describe(dtype: DLDataType) -> String {
    let kind = match dtype.code {
        DLDataTypeCode::INT => "int",
        DLDataTypeCode::UINT => "uint",
        DLDataTypeCode::FLOAT => "float",
        DLDataTypeCode::BFLOAT => "bfloat",
        DLDataTypeCode::COMPLEX => "complex",
        DLDataTypeCode::BOOL => return "bool".to_owned(),
        other => return format!("DLPack type code {} with {} bits", other.0, dtype.bits),
    };
    let lanes = if dtype.lanes == 1 { String::new() } else { format!("x{}", dtype.lanes) };
    format!("{kind}{}{lanes}", dtype.bits)
}
