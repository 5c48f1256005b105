//! Keeps panics inside the plugin and reports errors to the host.

use attache_core::{
    BackendError, ErrorCode,
    abi::{AbiSlice, AbiStr, Attribute, ErrorSink, Extension, Status},
    error::Result,
};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// The text of a panic.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without text")
}

/// Runs `function`; an error or a panic is reported to `sink` and becomes a status.
#[inline]
pub(crate) fn guarded(sink: *const ErrorSink, function: impl FnOnce() -> Result<()>) -> Status {
    match catch_unwind(AssertUnwindSafe(function)) {
        Ok(Ok(())) => Status::OK,
        Ok(Err(error)) => report(sink, &error),
        Err(payload) => {
            let error = BackendError::new(ErrorCode::Panic, format!("panicked: {}", panic_text(&*payload)));
            // Dropping a payload may panic too; that must not cross either.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                std::mem::forget(second);
            }
            report(sink, &error)
        }
    }
}

#[cold]
fn report(sink: *const ErrorSink, error: &BackendError) -> Status {
    let status = error.code.status();
    if sink.is_null() {
        return status;
    }
    let attributes: Vec<Attribute> = error
        .attributes
        .iter()
        .map(|(key, value)| Attribute { key: AbiStr::new(key), value: AbiStr::new(value) })
        .collect();
    // SAFETY: a non-null sink is the host's and lives for the call, as do the texts.
    unsafe {
        ((*sink).report)((*sink).context, status, AbiStr::new(&error.message), AbiSlice::new(&attributes));
    }
    status
}

/// A struct of the ABI that says its size and may carry additions.
pub(crate) trait HostStruct {
    fn size(&self) -> usize;
    fn extensions(&self) -> *const Extension;
}

macro_rules! sized {
    ($($name:ty),*) => {
        $(impl HostStruct for $name {
            fn size(&self) -> usize {
                self.size
            }
            fn extensions(&self) -> *const Extension {
                self.extensions
            }
        })*
    };
}
sized!(
    attache_core::abi::LayerConfigV1,
    attache_core::abi::BatchLimitsV1,
    attache_core::abi::BatchV1,
    attache_core::abi::ExecContextV1,
    attache_core::abi::ForwardV1,
    attache_core::abi::HostServicesV1
);

/// Borrows a struct of the host after checking its size and that no addition which must not be
/// ignored is there.
///
/// # Safety
/// `pointer` must be null or point to a `T` of the host that lives for `'a`.
#[inline]
pub(crate) unsafe fn borrowed<'a, T: HostStruct>(pointer: *const T, name: &str) -> Result<&'a T> {
    if pointer.is_null() {
        return Err(BackendError::invalid(format!("{name} is missing")));
    }
    // SAFETY: the caller vouches for it.
    let value = unsafe { &*pointer };
    if value.size() != size_of::<T>() {
        return Err(BackendError::invalid(format!(
            "{name} says its size is {} bytes; this plugin knows {}",
            value.size(),
            size_of::<T>()
        )));
    }
    let mut link = value.extensions();
    while !link.is_null() {
        // SAFETY: links live as long as the struct.
        let extension = unsafe { &*link };
        if extension.required != 0 {
            // SAFETY: as above.
            let id = unsafe { extension.id.to_string_lossy() };
            return Err(BackendError::unsupported(format!(
                "{name} carries the addition {id}, which this plugin does not know"
            )));
        }
        link = extension.next;
    }
    Ok(value)
}
