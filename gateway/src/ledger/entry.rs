//! What does a line of the journal look like?
//!
//! `CRC32 KIND JSON\n`: eight hex digits over everything after them, then `o` (opened), `c`
//! (checkpoint) or `s` (settled), then one JSON object. JSON never holds a raw newline, so a
//! damaged line costs itself and not the rest of its segment, and an operator can read a journal
//! with `less`. A settlement repeats the whole record: it needs no other line to be billed.
//!
//! Left out on purpose: compression and a binary form. A line is about 500 bytes and costs about
//! two microseconds to make; the disk is not what a gateway waits for.

use std::borrow::Cow;

use policies::price::Rates;
use serde::{Deserialize, Serialize};

use super::record::{Status, UsageRecord};

/// One line of the journal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Entry {
    /// A request was admitted. The rates are those in force then: a cut request is rated by them.
    Open(Box<UsageRecord>, Rates),
    /// What had been relayed of an open request, and by which node: a retry may have moved it.
    Checkpoint(Checkpoint, String),
    /// The request is over; this is its record.
    Settle(Box<UsageRecord>),
}

/// What had been relayed of an open request at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checkpoint {
    /// Which request.
    pub(crate) record_id: u128,
    /// Prompt tokens.
    pub(crate) input: u64,
    /// Of them cached.
    pub(crate) cached: u64,
    /// Tokens relayed so far.
    pub(crate) output: u64,
    /// Milliseconds since the request was opened.
    pub(crate) elapsed_ms: u32,
}

/// The line is not what was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a journal line is damaged")]
pub(crate) struct Damaged;

#[derive(Serialize, Deserialize)]
struct WireRates {
    input: i64,
    cached: i64,
    output: i64,
}

#[derive(Serialize, Deserialize)]
struct WireOpen<'a> {
    #[serde(flatten, borrow)]
    record: WireRecord<'a>,
    rates: WireRates,
}

#[derive(Serialize, Deserialize)]
struct WireCheckpoint<'a> {
    #[serde(borrow)]
    record_id: Cow<'a, str>,
    #[serde(borrow)]
    node: Cow<'a, str>,
    input: u64,
    cached: u64,
    output: u64,
    elapsed_ms: u32,
}

#[derive(Serialize, Deserialize)]
struct WireRecord<'a> {
    #[serde(borrow)]
    record_id: Cow<'a, str>,
    #[serde(borrow)]
    request_id: Cow<'a, str>,
    #[serde(borrow)]
    tenant: Cow<'a, str>,
    #[serde(borrow)]
    key_id: Cow<'a, str>,
    #[serde(borrow)]
    model: Cow<'a, str>,
    /// Left out where it is the model's id, as in lines from before there were aliases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    asked: Option<Cow<'a, str>>,
    #[serde(borrow)]
    node: Cow<'a, str>,
    #[serde(borrow)]
    session: Cow<'a, str>,
    t_ms: i64,
    input: u64,
    cached: u64,
    output: u64,
    #[serde(borrow)]
    status: Cow<'a, str>,
    cost: i64,
    savings: i64,
    #[serde(borrow)]
    price: Cow<'a, str>,
    ttft_ms: u32,
    duration_ms: u32,
}

/// The line of an opening.
pub(crate) fn open_line(record: &UsageRecord, rates: &Rates) -> Vec<u8> {
    let Rates {
        input,
        cached_input,
        output,
    } = *rates;
    let rates = WireRates {
        input,
        cached: cached_input,
        output,
    };
    line(
        b'o',
        &WireOpen {
            record: to_wire(record),
            rates,
        },
    )
}

/// The line of a checkpoint.
pub(crate) fn checkpoint_line(checkpoint: &Checkpoint, node: &str) -> Vec<u8> {
    let Checkpoint {
        record_id,
        input,
        cached,
        output,
        elapsed_ms,
    } = *checkpoint;
    line(
        b'c',
        &WireCheckpoint {
            record_id: id_text(record_id).into(),
            node: node.into(),
            input,
            cached,
            output,
            elapsed_ms,
        },
    )
}

/// The line of a settlement.
pub(crate) fn settle_line(record: &UsageRecord) -> Vec<u8> {
    line(b's', &to_wire(record))
}

/// Reads one line (without its newline).
pub(crate) fn decode(line: &[u8]) -> Result<Entry, Damaged> {
    let (crc, rest) = line.split_at_checked(8).ok_or(Damaged)?;
    let crc = std::str::from_utf8(crc).map_err(|_| Damaged)?;
    let crc = u32::from_str_radix(crc, 16).map_err(|_| Damaged)?;
    if crc != crc32fast::hash(rest) {
        return Err(Damaged);
    }
    match rest {
        [b' ', b'o', b' ', json @ ..] => {
            let open: WireOpen<'_> = parse(json)?;
            let WireRates {
                input,
                cached,
                output,
            } = open.rates;
            let rates = Rates {
                input,
                cached_input: cached,
                output,
            };
            Ok(Entry::Open(Box::new(from_wire(open.record)?), rates))
        }
        [b' ', b'c', b' ', json @ ..] => {
            let WireCheckpoint {
                record_id,
                node,
                input,
                cached,
                output,
                elapsed_ms,
            } = parse(json)?;
            let checkpoint = Checkpoint {
                record_id: parse_id(&record_id)?,
                input,
                cached,
                output,
                elapsed_ms,
            };
            Ok(Entry::Checkpoint(checkpoint, node.into_owned()))
        }
        [b' ', b's', b' ', json @ ..] => Ok(Entry::Settle(Box::new(from_wire(parse(json)?)?))),
        _ => Err(Damaged),
    }
}

fn line<T: Serialize>(kind: u8, value: &T) -> Vec<u8> {
    let mut line = Vec::with_capacity(640);
    line.extend_from_slice(b"00000000 ");
    line.push(kind);
    line.push(b' ');
    #[expect(
        clippy::expect_used,
        reason = "numbers and text into memory: nothing can fail"
    )]
    serde_json::to_writer(&mut line, value).expect("plain values serialise");
    let crc = format!("{:08x}", crc32fast::hash(&line[8..]));
    line[..8].copy_from_slice(crc.as_bytes());
    line.push(b'\n');
    line
}

fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Result<T, Damaged> {
    serde_json::from_slice(json).map_err(|_| Damaged)
}

/// A record id as it is written everywhere: a UUID in its usual form.
pub(crate) fn id_text(record_id: u128) -> String {
    uuid::Uuid::from_u128(record_id).to_string()
}

fn parse_id(text: &str) -> Result<u128, Damaged> {
    uuid::Uuid::try_parse(text)
        .map(|id| id.as_u128())
        .map_err(|_| Damaged)
}

fn to_wire(record: &UsageRecord) -> WireRecord<'_> {
    let UsageRecord {
        record_id,
        request_id,
        tenant,
        key_id,
        model,
        model_asked,
        node,
        session,
        t_ms,
        input_tokens,
        cached_tokens,
        output_tokens,
        status,
        cost_nano_usd,
        cache_savings_nano_usd,
        price_version,
        ttft_ms,
        duration_ms,
    } = record;
    WireRecord {
        record_id: id_text(*record_id).into(),
        request_id: request_id.into(),
        tenant: tenant.into(),
        key_id: key_id.into(),
        model: model.into(),
        asked: (model_asked != model).then(|| model_asked.into()),
        node: node.into(),
        session: session.into(),
        t_ms: *t_ms,
        input: *input_tokens,
        cached: *cached_tokens,
        output: *output_tokens,
        status: status.as_str().into(),
        cost: *cost_nano_usd,
        savings: *cache_savings_nano_usd,
        price: price_version.into(),
        ttft_ms: *ttft_ms,
        duration_ms: *duration_ms,
    }
}

fn from_wire(wire: WireRecord<'_>) -> Result<UsageRecord, Damaged> {
    let WireRecord {
        record_id,
        request_id,
        tenant,
        key_id,
        model,
        asked,
        node,
        session,
        t_ms,
        input,
        cached,
        output,
        status,
        cost,
        savings,
        price,
        ttft_ms,
        duration_ms,
    } = wire;
    Ok(UsageRecord {
        record_id: parse_id(&record_id)?,
        request_id: request_id.into_owned(),
        tenant: tenant.into_owned(),
        key_id: key_id.into_owned(),
        model_asked: asked.map_or_else(|| model.clone().into_owned(), Cow::into_owned),
        model: model.into_owned(),
        node: node.into_owned(),
        session: session.into_owned(),
        t_ms,
        input_tokens: input,
        cached_tokens: cached,
        output_tokens: output,
        status: Status::parse(&status).ok_or(Damaged)?,
        cost_nano_usd: cost,
        cache_savings_nano_usd: savings,
        price_version: price.into_owned(),
        ttft_ms,
        duration_ms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> UsageRecord {
        UsageRecord {
            record_id: 0x0197_0000_0000_7000_8000_0000_0000_0001,
            request_id: "weird \"id\"\n\u{1f980}".to_owned(),
            tenant: "demo".to_owned(),
            key_id: "key_1".to_owned(),
            model: "m".to_owned(),
            model_asked: "claude-m".to_owned(),
            node: "n0".to_owned(),
            session: "s".to_owned(),
            t_ms: 1_800_000_000_000,
            input_tokens: 1000,
            cached_tokens: 992,
            output_tokens: 10,
            status: Status::Complete,
            cost_nano_usd: 12_345,
            cache_savings_nano_usd: 99,
            price_version: "2026-11".to_owned(),
            ttft_ms: 12,
            duration_ms: 345,
        }
    }

    /// Would catch a field that is lost on its way through the journal, or a raw newline in a line.
    #[test]
    fn lines_come_back() {
        let rates = Rates {
            input: 1,
            cached_input: 2,
            output: 3,
        };
        let checkpoint = Checkpoint {
            record_id: 7,
            input: 1,
            cached: 0,
            output: 5,
            elapsed_ms: 250,
        };
        for (line, expected) in [
            (
                open_line(&record(), &rates),
                Entry::Open(Box::new(record()), rates),
            ),
            (
                checkpoint_line(&checkpoint, "n"),
                Entry::Checkpoint(checkpoint, "n".to_owned()),
            ),
            (settle_line(&record()), Entry::Settle(Box::new(record()))),
        ] {
            let (newline, body) = line.split_last().unwrap();
            assert_eq!(*newline, b'\n');
            assert!(!body.contains(&b'\n'));
            assert_eq!(decode(body).unwrap(), expected);
        }
    }

    /// Would catch a segment from before there were aliases that cannot be read any more.
    #[test]
    fn lines_without_an_alias_are_as_they_were() {
        let record = UsageRecord {
            model_asked: "m".to_owned(),
            ..record()
        };
        let line = settle_line(&record);
        assert!(!line.windows(5).any(|part| part == b"asked"));
        let read = decode(&line[..line.len() - 1]).unwrap();
        assert_eq!(read, Entry::Settle(Box::new(record)));
    }

    /// Would catch a checksum that does not cover every byte of the line.
    #[test]
    fn any_flipped_bit_is_noticed() {
        let line = settle_line(&record());
        let body = &line[..line.len() - 1];
        for at in 0..body.len() * 8 {
            let mut damaged = body.to_vec();
            damaged[at / 8] ^= 1 << (at % 8);
            // A hex digit of the checksum may change case without changing its value.
            if at / 8 < 8 && damaged[at / 8].eq_ignore_ascii_case(&body[at / 8]) {
                continue;
            }
            assert_eq!(decode(&damaged), Err(Damaged), "bit {at}");
        }
    }
}
