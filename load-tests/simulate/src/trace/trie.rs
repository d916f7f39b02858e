//! The block-trie format: each line names a prefix of an earlier line's path and how many blocks
//! follow it for the first time.

use std::io::BufRead;

use serde::Deserialize;

use super::{Builder, Mode, Raw, Trace, TraceError, group, lines, parse};

#[derive(Deserialize)]
struct Head {
    name: String,
    block: u32,
    mode: WireMode,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum WireMode {
    Open,
    Closed,
}

/// `[t_ms, session, in_tokens, out_tokens, dep, think_ms, ref, keep, new]`
type Line = (f64, u32, u32, u32, i64, f64, i64, u32, u32);

/// A block of the file's own size.
struct Fine {
    parent: Option<u32>,
    depth: u32,
    /// The last whole group at or above it.
    group: Option<u32>,
}

#[derive(Default)]
struct Blocks {
    fine: Vec<Fine>,
    /// Each group's parent.
    groups: Vec<Option<u32>>,
}

impl Blocks {
    fn depth(&self, block: Option<u32>) -> u32 {
        block.map_or(0, |b| self.fine[b as usize].depth)
    }

    fn group(&self, block: Option<u32>) -> Option<u32> {
        self.fine[block? as usize].group
    }

    fn child(&mut self, parent: Option<u32>, group_len: u32) -> Option<u32> {
        let depth = self.depth(parent) + 1;
        let mut group = self.group(parent);
        if depth.is_multiple_of(group_len) {
            self.groups.push(group);
            group = Some(self.groups.len() as u32 - 1);
        }
        self.fine.push(Fine {
            parent,
            depth,
            group,
        });
        Some(self.fine.len() as u32 - 1)
    }

    fn path(&self, end: Option<u32>, path: &mut Vec<u32>) {
        path.clear();
        let mut next = self.group(end);
        while let Some(group) = next {
            path.push(group);
            next = self.groups[group as usize];
        }
        path.reverse();
    }
}

pub(super) fn read(first: &str, input: impl BufRead) -> Result<Trace, TraceError> {
    let head: Head = parse(1, first)?;
    let group_len = group(head.block, 1)? as u32;
    let mode = match head.mode {
        WireMode::Open => Mode::Open,
        WireMode::Closed => Mode::Closed,
    };
    let mut builder = Builder::new(&head.name, mode);
    let mut blocks = Blocks::default();
    let mut ends: Vec<Option<u32>> = Vec::new();
    let mut path = Vec::new();
    for line in lines(input) {
        let (number, text) = line?;
        let (at_ms, session, prompt, output, after, think_ms, from, keep, new): Line =
            parse(number, &text)?;
        let earlier = |index: i64, what: &str| {
            usize::try_from(index)
                .ok()
                .filter(|i| *i < ends.len())
                .ok_or_else(|| TraceError::Line {
                    line: number,
                    reason: format!("{what} {index} is no earlier request"),
                })
        };
        let mut end = None;
        if keep > 0 {
            end = ends[earlier(from, "ref")?];
            while blocks.depth(end) > keep {
                end = end.and_then(|b| blocks.fine[b as usize].parent);
            }
        }
        let after = match after {
            -1 => None,
            index => Some(earlier(index, "dep")? as u32),
        };
        for _ in 0..new {
            end = blocks.child(end, group_len);
        }
        ends.push(end);
        blocks.path(end, &mut path);
        let raw = Raw {
            at_ms,
            session,
            prompt_tokens: prompt,
            output_tokens: output,
            after,
            think_ms,
        };
        builder.push(raw, &path);
    }
    Ok(builder.finish(blocks.groups.len() as u32))
}
