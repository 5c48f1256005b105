//! The small types that every table and struct of the ABI is made of.

use abi_stable::StableAbi;
use core::ffi::c_void;

/// Borrowed UTF-8 text: valid for the duration of the call that passes it, unless said otherwise.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct AbiStr {
    /// First byte; may be null when `len` is 0.
    pub ptr: *const u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: only a pointer and a length; reading through it is `unsafe` and vouched for there.
unsafe impl Send for AbiStr {}
// SAFETY: as above.
unsafe impl Sync for AbiStr {}

impl AbiStr {
    /// Borrows `text`.
    #[must_use]
    pub const fn new(text: &str) -> Self {
        Self { ptr: text.as_ptr(), len: text.len() }
    }

    /// The empty text.
    pub const EMPTY: Self = Self { ptr: core::ptr::null(), len: 0 };

    /// Reads the text; `None` when it is not UTF-8.
    ///
    /// # Safety
    /// `ptr..ptr+len` must be readable for `'a`, or `len` be 0.
    #[must_use]
    pub unsafe fn as_str<'a>(self) -> Option<&'a str> {
        if self.len == 0 || self.ptr.is_null() {
            return Some("");
        }
        // SAFETY: the caller vouches for the range.
        let bytes = unsafe { core::slice::from_raw_parts(self.ptr, self.len) };
        core::str::from_utf8(bytes).ok()
    }

    /// Reads the text with invalid UTF-8 replaced.
    ///
    /// # Safety
    /// As for [`AbiStr::as_str`].
    #[must_use]
    pub unsafe fn to_string_lossy(self) -> String {
        if self.len == 0 || self.ptr.is_null() {
            return String::new();
        }
        // SAFETY: the caller vouches for the range.
        String::from_utf8_lossy(unsafe { core::slice::from_raw_parts(self.ptr, self.len) }).into_owned()
    }
}

/// A borrowed array: `len` values of `T`, valid for the duration of the call.
#[repr(C)]
#[derive(StableAbi)]
pub struct AbiSlice<T> {
    /// First value; may be null when `len` is 0.
    pub ptr: *const T,
    /// Number of values.
    pub len: usize,
}

impl<T> Clone for AbiSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for AbiSlice<T> {}

impl<T> AbiSlice<T> {
    /// Borrows `values`.
    #[must_use]
    pub const fn new(values: &[T]) -> Self {
        Self { ptr: values.as_ptr(), len: values.len() }
    }

    /// The empty array.
    pub const EMPTY: Self = Self { ptr: core::ptr::null(), len: 0 };

    /// Reads the array.
    ///
    /// # Safety
    /// `ptr` must point to `len` values of `T` that live for `'a`, or `len` be 0.
    #[must_use]
    pub unsafe fn as_slice<'a>(self) -> &'a [T] {
        if self.len == 0 || self.ptr.is_null() {
            &[]
        } else {
            // SAFETY: the caller vouches for the range.
            unsafe { core::slice::from_raw_parts(self.ptr, self.len) }
        }
    }
}

/// A key and a value, both text: how requests, device facts and error details cross, because their
/// set of keys grows without a change of layout.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct Attribute {
    /// What the value is, for instance `head_size`.
    pub key: AbiStr,
    /// The value as text, for instance `128`.
    pub value: AbiStr,
}

/// Head of one link in a chain of optional additions to a struct. A reader that does not know `id`
/// skips the link, unless `required` is 1: then it refuses the call.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct Extension {
    /// Bytes of the whole link, this head included.
    pub size: usize,
    /// Name and generation of the addition, for instance `attache.dcp/1`.
    pub id: AbiStr,
    /// 1 when ignoring the addition would give a wrong result.
    pub required: u8,
    /// The next link, or null.
    pub next: *const Extension,
}

/// The result code of a call. The text of an error crosses through an [`ErrorSink`].
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, StableAbi)]
pub struct Status(pub i32);

impl Status {
    /// The call did what it says.
    pub const OK: Self = Self(0);
    /// An argument breaks the contract; nothing was changed.
    pub const INVALID_ARGUMENT: Self = Self(1);
    /// The request is well formed, and this backend cannot do it.
    pub const UNSUPPORTED: Self = Self(2);
    /// Memory (host, device or workspace) does not suffice.
    pub const OUT_OF_MEMORY: Self = Self(3);
    /// The device or its driver is missing or gone.
    pub const DEVICE_UNAVAILABLE: Self = Self(4);
    /// An index (a block id, a slot) lies outside its tensor.
    pub const OUT_OF_RANGE: Self = Self(5);
    /// The plugin's code panicked; the panic was caught inside the plugin.
    pub const PANIC: Self = Self(6);
    /// Any other failure inside the plugin.
    pub const INTERNAL: Self = Self(7);
    /// The interface or generation asked for does not exist here.
    pub const NOT_FOUND: Self = Self(8);
}

/// Where a callee reports why it failed: the host copies the texts during the call, so that no
/// allocation is freed on the other side.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct ErrorSink {
    /// Bytes of this struct.
    pub size: usize,
    /// Handed back to `report`.
    pub context: *mut c_void,
    /// Called at most once, with the code, one readable line, and details.
    pub report:
        unsafe extern "C" fn(context: *mut c_void, code: Status, message: AbiStr, attributes: AbiSlice<Attribute>),
}

/// Receives texts, one a call.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct TextSink {
    /// Bytes of this struct.
    pub size: usize,
    /// Handed back to `push`.
    pub context: *mut c_void,
    /// Receives one text; the receiver copies it.
    pub push: unsafe extern "C" fn(context: *mut c_void, text: AbiStr),
}

/// Receives lists of attributes (a device's facts, say), one list a call.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct AttributeSink {
    /// Bytes of this struct.
    pub size: usize,
    /// Handed back to `push`.
    pub context: *mut c_void,
    /// Receives one list; the receiver copies it.
    pub push: unsafe extern "C" fn(context: *mut c_void, attributes: AbiSlice<Attribute>),
}

/// `DLDevice` of DLPack: `device_type` 1 = CPU, 2 = CUDA, 10 = ROCm.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, StableAbi)]
pub struct DlDevice {
    /// DLPack's device type.
    pub device_type: i32,
    /// Index among the devices of that type.
    pub device_id: i32,
}

impl DlDevice {
    /// Host memory.
    pub const CPU: Self = Self { device_type: 1, device_id: 0 };
}

/// `DLDataType` of DLPack.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, StableAbi)]
pub struct DlDataType {
    /// DLPack's type code (0 int, 1 uint, 2 float, 4 bfloat, 10 float8_e4m3fn, …).
    pub code: u8,
    /// Bits of one element.
    pub bits: u8,
    /// Vector lanes; always 1 here.
    pub lanes: u16,
}

/// `DLTensor` of DLPack, field for field, so that engines pass what they have.
#[repr(C)]
#[derive(Clone, Copy, Debug, StableAbi)]
pub struct Tensor {
    /// Start of the allocation.
    pub data: *mut c_void,
    /// Where `data` lies.
    pub device: DlDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DlDataType,
    /// `ndim` sizes.
    pub shape: *mut i64,
    /// `ndim` strides in elements, or null for compact row-major.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// What a tensor of the KV cache holds.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, StableAbi)]
pub struct TensorRole(pub u32);

impl TensorRole {
    /// Keys.
    pub const K: Self = Self(1);
    /// Values.
    pub const V: Self = Self(2);
    /// Keys and values in one tensor.
    pub const PACKED_KV: Self = Self(3);
    /// MLA rows `[latent | rope]`.
    pub const LATENT: Self = Self(4);
    /// One f32 scale per key and KV head.
    pub const K_SCALES: Self = Self(5);
    /// One f32 scale per value and KV head.
    pub const V_SCALES: Self = Self(6);
    /// Recurrent state.
    pub const STATE: Self = Self(7);
    /// Convolution state.
    pub const CONV_STATE: Self = Self(8);
}

/// One tensor of the cache.
#[repr(C)]
#[derive(Clone, Copy, StableAbi)]
pub struct CacheTensor {
    /// What it holds.
    pub role: TensorRole,
    /// Where it is.
    pub tensor: Tensor,
}
