//! GGUF files: metadata with types, tensors with the shapes that the metadata asks for.
//!
//! Owns what a file may say and how it is refused. Must not know: what is computed with a tensor.
//! The file is read by candle's `gguf_file`; nothing it says is believed unchecked: each tensor is
//! held against the metadata, and a contradiction names both.

mod geometry;
mod metadata;

pub use geometry::Geometry;
pub use metadata::Metadata;

use crate::{
    error::{EngineError, GgufError, Result},
    linear::Linear,
    model::{gemma3, llama},
};
use candle_core::{
    Device,
    quantized::{GgmlDType, QTensor, gguf_file},
};
use std::{
    collections::BTreeSet,
    fs::File,
    io::BufReader,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

/// The architectures that the engine runs.
pub const ARCHITECTURES: &str = "llama and gemma3";

/// How matrices are kept in memory.
///
/// In the file's own format they are small, and activations are rounded to 8 bits for each product.
/// In f32 they take four bytes an element, and products are those of the file's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weights {
    /// In f32 where all of them take at most 4 GiB so, else in the file's format.
    #[default]
    Auto,
    /// In the file's format.
    Quantised,
    /// In f32.
    Dequantised,
}

/// Bytes up to which [`Weights::Auto`] keeps matrices in f32.
const AUTO_LIMIT: u64 = 4 << 30;

/// An open GGUF file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    content: gguf_file::Content,
    metadata: Metadata,
    reader: BufReader<File>,
    length: u64,
    weights: Weights,
    /// Tensors that a model has asked for.
    used: BTreeSet<String>,
}

impl GgufFile {
    /// Opens a file and reads its metadata; no weights yet.
    ///
    /// # Errors
    /// When the file cannot be read or is not a whole GGUF file.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| EngineError::Io { path: path.to_owned(), source };
        let unreadable =
            |reason: String| EngineError::Gguf { path: path.to_owned(), source: GgufError::Unreadable { reason } };
        let file = File::open(path).map_err(io)?;
        let facts = file.metadata().map_err(io)?;
        if facts.is_dir() {
            return Err(unreadable("it is a folder".to_owned()));
        }
        let length = facts.len();
        let mut reader = BufReader::with_capacity(1 << 20, file);
        // candle divides by the file's alignment: 0 is a panic there, and an unusable file here.
        let mut content = catch_unwind(AssertUnwindSafe(|| gguf_file::Content::read(&mut reader)))
            .map_err(|_| unreadable("the reader failed on its header (general.alignment = 0?)".to_owned()))?
            .map_err(|error| unreadable(first_line(&error)))?;
        let metadata = Metadata::new(std::mem::take(&mut content.metadata));
        Ok(Self {
            path: path.to_owned(),
            content,
            metadata,
            reader,
            length,
            weights: Weights::Auto,
            used: BTreeSet::new(),
        })
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file says about itself.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The architecture, if it is one that the engine runs.
    ///
    /// # Errors
    /// For a missing or another architecture.
    pub fn architecture(&self) -> Result<&'static str, GgufError> {
        let found = self.metadata.string("general.architecture")?;
        [llama::ARCHITECTURE, gemma3::ARCHITECTURE]
            .into_iter()
            .find(|known| *known == found)
            .ok_or_else(|| GgufError::Architecture { found: found.to_owned(), supported: ARCHITECTURES })
    }

    /// The model's dimensions, each checked by itself.
    ///
    /// # Errors
    /// For a missing key or a value that makes no sense.
    pub fn geometry(&self) -> Result<Geometry, GgufError> {
        Geometry::read(self.architecture()?, &self.metadata, self.content.tensor_infos.len())
    }

    /// Whether the file holds a tensor.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// The shape of a tensor: rows first.
    ///
    /// # Errors
    /// When there is no such tensor.
    pub fn shape(&self, name: &str) -> Result<&[usize], GgufError> {
        let info = self.content.tensor_infos.get(name);
        info.map(|info| info.shape.dims()).ok_or_else(|| GgufError::MissingTensor { name: name.to_owned() })
    }

    /// The matrix `name`, which must be `[rows, cols]`, as `because` says.
    ///
    /// # Errors
    /// When it is missing, has another shape or format, or lies outside the file.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize, because: &str) -> Result<Linear, GgufError> {
        let keep_format = match self.weights {
            Weights::Quantised => true,
            Weights::Dequantised => false,
            Weights::Auto => self.bytes_as_f32() > AUTO_LIMIT,
        };
        Linear::from_gguf(name, &self.tensor(name, &[rows, cols], because)?, keep_format)
    }

    /// Bytes of all tensors in f32.
    fn bytes_as_f32(&self) -> u64 {
        // A file may state any number: candle's own product of the dimensions would overflow.
        let bytes = |info: &gguf_file::TensorInfo| {
            info.shape.dims().iter().fold(4, |bytes: u64, dim| bytes.saturating_mul(*dim as u64))
        };
        self.content.tensor_infos.values().map(bytes).fold(0, u64::saturating_add)
    }

    /// Chooses how matrices are kept from now on.
    pub fn set_weights(&mut self, weights: Weights) {
        self.weights = weights;
    }

    /// The vector `name`, which must have `len` values, as `because` says.
    ///
    /// # Errors
    /// As [`GgufFile::matrix`]; also when it is quantised.
    pub fn vector(&mut self, name: &str, len: usize, because: &str) -> Result<Vec<f32>, GgufError> {
        let tensor = self.tensor(name, &[len], because)?;
        let fail = |reason: String| GgufError::Tensor { name: name.to_owned(), reason };
        if !matches!(tensor.dtype(), GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16) {
            return Err(fail(format!("format {:?} where F32, F16 or BF16 is expected", tensor.dtype())));
        }
        let values = tensor.dequantize(&Device::Cpu).and_then(|values| values.to_vec1());
        values.map_err(|error| fail(first_line(&error)))
    }

    fn tensor(&mut self, name: &str, expected: &[usize], because: &str) -> Result<QTensor, GgufError> {
        let fail = |reason: String| GgufError::Tensor { name: name.to_owned(), reason };
        let found = self.shape(name)?;
        if found != expected {
            return Err(GgufError::Shape {
                name: name.to_owned(),
                found: found.to_vec(),
                expected: expected.to_vec(),
                because: because.to_owned(),
            });
        }
        let info = &self.content.tensor_infos[name];
        let (block, size) = (info.ggml_dtype.block_size(), info.ggml_dtype.type_size());
        let cols = expected.last().copied().unwrap_or(1);
        if !cols.is_multiple_of(block) {
            return Err(fail(format!(
                "rows of {cols} values cannot be stored in {:?} blocks of {block}",
                info.ggml_dtype
            )));
        }
        let elements = expected.iter().try_fold(1_usize, |product, dim| product.checked_mul(*dim));
        let bytes = elements.and_then(|count| (count / block).checked_mul(size)).map(|bytes| bytes as u64);
        let end = bytes.and_then(|bytes| self.content.tensor_data_offset.checked_add(info.offset)?.checked_add(bytes));
        if end.is_none_or(|end| end > self.length) {
            return Err(fail(format!(
                "it ends outside the file of {} bytes: the file is truncated, download it again",
                self.length
            )));
        }
        self.used.insert(name.to_owned());
        self.content.tensor(&mut self.reader, name, &Device::Cpu).map_err(|error| fail(first_line(&error)))
    }

    /// Refuses a file with tensors that no part of the model has asked for: they would change its
    /// results (a bias, experts, another norm), and the engine would ignore them.
    ///
    /// # Errors
    /// Names the first such tensor.
    pub fn finish(&self) -> Result<(), GgufError> {
        let unused = self.content.tensor_infos.keys().filter(|name| !self.used.contains(*name)).min();
        unused.map_or(Ok(()), |name| {
            Err(GgufError::Tensor {
                name: name.clone(),
                reason: "the engine's form of this architecture has no such tensor, and ignoring it would change the results".to_owned(),
            })
        })
    }
}

/// The first line of an error's text: candle adds backtraces.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
