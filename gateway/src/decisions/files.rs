//! Where does the decision log lie?
//!
//! `DATA/decisions/00000001.jsonl` and so on: one JSON object a line, the numbers rising. A file is
//! ended when it is an eighth of what may be kept, and the oldest goes when there are more than
//! eight. A line that a crash cut short is passed over when read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::Decided;

/// Files that are kept.
const FILES: u64 = 8;
/// The folder within the data directory.
const FOLDER: &str = "decisions";

/// Why the log cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LogError {
    /// There is none.
    #[error(
        "{0} holds no decision log: name the gateway's directory with --data, and see [decisions] in docs/CONFIGURATION.md"
    )]
    Missing(PathBuf),
    /// A file cannot be read.
    #[error("{0}: {1}")]
    Io(PathBuf, io::Error),
}

/// The end of the log.
pub(super) struct Writer {
    dir: PathBuf,
    file_bytes_max: u64,
    /// Of the current file, or of the next where there is none yet: a gateway that routes nothing
    /// leaves no file.
    number: u64,
    bytes: u64,
    file: Option<BufWriter<File>>,
}

impl Writer {
    /// Begins a new file behind those that are there.
    pub(super) fn open(data: &Path, bytes_max: u64) -> io::Result<Self> {
        let dir = data.join(FOLDER);
        crate::secrets::private_dir(&dir)?;
        let number = list(&dir)?.last().map_or(1, |(number, _)| number + 1);
        Ok(Self {
            file: None,
            file_bytes_max: (bytes_max / FILES).max(1),
            number,
            bytes: 0,
            dir,
        })
    }

    /// Writes a line; it may stay in memory until [`Writer::flush`].
    pub(super) fn append(&mut self, decided: &Decided) -> io::Result<()> {
        let mut line = serde_json::to_vec(decided)?;
        line.push(b'\n');
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.file_bytes_max {
            self.flush()?;
            self.file = None;
            self.number += 1;
            self.bytes = 0;
        }
        if self.file.is_none() {
            self.file = Some(create(&self.dir, self.number)?);
            self.drop_old()?;
        }
        self.bytes += line.len() as u64;
        self.file
            .as_mut()
            .map_or(Ok(()), |file| file.write_all(&line))
    }

    /// Gives everything to the kernel.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), BufWriter::flush)
    }

    fn drop_old(&self) -> io::Result<()> {
        list(&self.dir)?
            .into_iter()
            .filter(|(number, _)| number + FILES <= self.number)
            .try_for_each(|(_, path)| fs::remove_file(path))
    }
}

/// The turns that go by this id, oldest first.
pub(crate) fn find_in(data: &Path, id: &str) -> Result<Vec<Decided>, LogError> {
    let dir = data.join(FOLDER);
    if !dir.is_dir() {
        return Err(LogError::Missing(data.to_owned()));
    }
    // As it stands in the line: most lines need not be parsed then.
    let quoted = serde_json::Value::from(id).to_string();
    let mut found = Vec::new();
    for (_, path) in list(&dir).map_err(|error| LogError::Io(dir.clone(), error))? {
        let failed = |error| LogError::Io(path.clone(), error);
        let file = match File::open(&path) {
            Ok(file) => file,
            // A running gateway has just dropped it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        for line in BufReader::new(file).split(b'\n') {
            let line = line.map_err(failed)?;
            let text = String::from_utf8_lossy(&line);
            if !text.contains(&quoted) {
                continue;
            }
            if let Ok(decided) = serde_json::from_str::<Decided>(&text)
                && decided.is_called(id)
            {
                found.push(decided);
            }
        }
    }
    Ok(found)
}

fn create(dir: &Path, number: u64) -> io::Result<BufWriter<File>> {
    let path = dir.join(format!("{number:08}.jsonl"));
    let file = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    Ok(BufWriter::new(file))
}

/// The log's files by their numbers.
fn list(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let number = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_suffix(".jsonl"))
            .and_then(|digits| digits.parse().ok());
        if let Some(number) = number {
            files.push((number, path));
        }
    }
    files.sort();
    Ok(files)
}
