//! Files and standard input as lines of bounded length, unpacked if they are compressed.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;

/// Longer lines are skipped, and not kept in memory.
pub(crate) const MAX_LINE: usize = 65_536;
const BUFFER: usize = 65_536;

pub(crate) enum Line {
    /// A complete line, in the buffer, without its line end.
    Whole,
    TooLong,
    End,
}

pub(crate) struct Input {
    pub(crate) name: String,
    bytes: Box<dyn BufRead>,
}

impl Input {
    /// Opens a file, or standard input for `-`. `read` counts the bytes that were read from it, and
    /// `total` grows by its size, if the size is known.
    pub(crate) fn open(name: &str, read: &Rc<Cell<u64>>, total: &mut u64) -> io::Result<Self> {
        let file: Box<dyn Read> = if name == "-" {
            Box::new(io::stdin())
        } else {
            let file = File::open(name)?;
            let about = file.metadata()?;
            if about.is_dir() {
                return Err(io::Error::other("is a directory"));
            }
            *total += about.len();
            Box::new(file)
        };
        let counted = Counted { inner: file, read: read.clone() };
        let bytes = unpacked(BufReader::with_capacity(BUFFER, counted))?;
        Ok(Self { name: name.to_owned(), bytes })
    }

    pub(crate) fn line(&mut self, line: &mut Vec<u8>) -> io::Result<Line> {
        line.clear();
        let length = (&mut self.bytes).take(MAX_LINE as u64 + 1).read_until(b'\n', line)?;
        if length == 0 {
            return Ok(Line::End);
        }
        if line.last() == Some(&b'\n') {
            line.pop();
        } else if length > MAX_LINE {
            self.bytes.skip_until(b'\n')?;
            return Ok(Line::TooLong);
        }
        Ok(Line::Whole)
    }
}

fn unpacked(mut file: impl BufRead + 'static) -> io::Result<Box<dyn BufRead>> {
    // A pipe may deliver a single byte first.
    let mut magic = Vec::new();
    (&mut file).take(2).read_to_end(&mut magic)?;
    let packed = magic == [0x1f, 0x8b];
    let file = Cursor::new(magic).chain(file);
    if packed {
        return Ok(Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(file))));
    }
    Ok(Box::new(file))
}

struct Counted<R> {
    inner: R,
    read: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.read.set(self.read.get() + length as u64);
        Ok(length)
    }
}
