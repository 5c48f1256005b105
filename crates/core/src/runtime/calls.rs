//! The sinks that collect what a plugin reports during a call.

use crate::{
    abi::{AbiSlice, AbiStr, Attribute, AttributeSink, CacheSpecSink, CacheTensorSpecV1, ErrorSink, Status, TextSink},
    cache::CacheTensorSpec,
    dtype::DataType,
    error::{BackendError, ErrorCode, Result},
};
use std::ffi::c_void;

unsafe extern "C" fn report(context: *mut c_void, code: Status, message: AbiStr, attributes: AbiSlice<Attribute>) {
    // SAFETY: `context` is the `Option<BackendError>` of `call` below, which waits for the call.
    let slot = unsafe { &mut *context.cast::<Option<BackendError>>() };
    *slot = Some(BackendError {
        code: ErrorCode::from_status(code),
        // SAFETY: the plugin lends the text for the call.
        message: unsafe { message.to_string_lossy() },
        // SAFETY: as above.
        attributes: unsafe { pairs(attributes) },
    });
}

/// Copies attributes.
///
/// # Safety
/// The slice and its texts must be readable.
unsafe fn pairs(attributes: AbiSlice<Attribute>) -> Vec<(String, String)> {
    // SAFETY: the caller vouches for it.
    let attributes = unsafe { attributes.as_slice() };
    attributes
        .iter()
        // SAFETY: as above.
        .map(|attribute| unsafe { (attribute.key.to_string_lossy(), attribute.value.to_string_lossy()) })
        .collect()
}

/// Runs `function` with an error sink and turns its status into a result.
#[inline]
pub(super) fn call(what: &str, function: impl FnOnce(*const ErrorSink) -> Status) -> Result<()> {
    let mut slot: Option<BackendError> = None;
    let sink = ErrorSink { size: size_of::<ErrorSink>(), context: (&raw mut slot).cast(), report };
    let status = function(&raw const sink);
    if status == Status::OK {
        return Ok(());
    }
    Err(match slot {
        // The returned status rules; a plugin may have reported another one.
        Some(mut error) => {
            error.code = ErrorCode::from_status(status);
            error
        }
        None => BackendError::new(ErrorCode::from_status(status), format!("{what} failed without saying why")),
    })
}

/// Collects texts.
pub(super) fn texts(
    what: &str,
    function: impl FnOnce(*const TextSink, *const ErrorSink) -> Status,
) -> Result<Vec<String>> {
    unsafe extern "C" fn push(context: *mut c_void, text: AbiStr) {
        // SAFETY: `context` is the vector below; the plugin lends the text for the call.
        unsafe { (*context.cast::<Vec<String>>()).push(text.to_string_lossy()) };
    }
    let mut collected: Vec<String> = Vec::new();
    let sink = TextSink { size: size_of::<TextSink>(), context: (&raw mut collected).cast(), push };
    call(what, |error| function(&raw const sink, error))?;
    Ok(collected)
}

/// Collects lists of attributes.
pub(super) fn attribute_lists(
    what: &str,
    function: impl FnOnce(*const AttributeSink, *const ErrorSink) -> Status,
) -> Result<Vec<Vec<(String, String)>>> {
    unsafe extern "C" fn push(context: *mut c_void, attributes: AbiSlice<Attribute>) {
        // SAFETY: `context` is the vector below; the plugin lends the list for the call.
        unsafe { (*context.cast::<Vec<Vec<(String, String)>>>()).push(pairs(attributes)) };
    }
    let mut collected: Vec<Vec<(String, String)>> = Vec::new();
    let sink = AttributeSink { size: size_of::<AttributeSink>(), context: (&raw mut collected).cast(), push };
    call(what, |error| function(&raw const sink, error))?;
    Ok(collected)
}

/// Collects cache tensors.
pub(super) fn cache_specs(
    what: &str,
    function: impl FnOnce(*const CacheSpecSink, *const ErrorSink) -> Status,
) -> Result<Vec<CacheTensorSpec>> {
    type Collected = Vec<Result<CacheTensorSpec>>;
    unsafe extern "C" fn push(context: *mut c_void, spec: *const CacheTensorSpecV1) {
        // SAFETY: `context` is the vector below; the plugin lends the specification for the call.
        let (collected, spec) = unsafe { (&mut *context.cast::<Collected>(), &*spec) };
        let dtype = DataType::from_dl(spec.dtype).ok_or_else(|| {
            BackendError::invalid(format!(
                "the plugin's cache tensor has the unknown element type (code {}, {} bits)",
                spec.dtype.code, spec.dtype.bits
            ))
        });
        collected.push(dtype.map(|dtype| CacheTensorSpec {
            role: spec.role,
            dtype,
            // SAFETY: as above.
            shape: unsafe { spec.shape.as_slice() }.to_vec(),
            alignment: spec.alignment,
            bytes_per_block: spec.bytes_per_block,
        }));
    }
    let mut collected: Collected = Vec::new();
    let sink = CacheSpecSink { size: size_of::<CacheSpecSink>(), context: (&raw mut collected).cast(), push };
    call(what, |error| function(&raw const sink, error))?;
    collected.into_iter().collect()
}

/// Text by name, borrowed for a call.
pub(super) struct Attributes(Vec<Attribute>);

impl Attributes {
    pub(super) fn new(pairs: &[(String, String)]) -> Self {
        Self(pairs.iter().map(|(key, value)| Attribute { key: AbiStr::new(key), value: AbiStr::new(value) }).collect())
    }

    pub(super) fn as_abi(&self) -> AbiSlice<Attribute> {
        AbiSlice::new(&self.0)
    }
}
