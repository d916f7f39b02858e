//! What does a turn of a known conversation look like on the wire, in each dialect?
//!
//! An agent: a system prompt and tools that all share, a task of its own, then steps, each some
//! words, a call and its result. Every connection is one agent whose *opening* has been sent before.
//! From there it takes [`TURNS`] turns, each with one step more than the last, all of them new; then
//! it goes back to its opening, as an agent does that tries again, so that sizes stay bounded and
//! every request but for its last step has been seen. The same conversation in each dialect.
//!
//! Bodies are put together from pieces that were rendered once: a load generator which renders JSON
//! takes the cores from what it measures.

use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use crate::workload;

/// Turns between an agent's opening and its next try.
pub(super) const TURNS: u64 = 4;

/// Stands where a number goes.
const PLACE: &str = "0000000000000000";

/// What the client speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// OpenAI's Chat Completions.
    Chat,
    /// Anthropic's Messages.
    Messages,
    /// OpenAI's Responses.
    Responses,
}

impl Dialect {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }

    /// Below `/v1/`.
    pub(super) fn endpoint(self) -> &'static str {
        match self {
            Self::Chat => "chat/completions",
            Self::Messages => "messages",
            Self::Responses => "responses",
        }
    }

    /// What each word of a stream has, and nothing else of it.
    pub(super) fn word_mark(self) -> &'static [u8] {
        match self {
            Self::Chat => br#""content":"word ""#,
            Self::Messages => br#""text":"word ""#,
            Self::Responses => br#""delta":"word ""#,
        }
    }
}

/// Whether an answer comes whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    Whole,
    Stream,
}

/// Bytes with places for a number.
struct Piece {
    bytes: Vec<u8>,
    places: Vec<usize>,
}

impl Piece {
    fn new(text: String) -> Self {
        let places = text.match_indices(PLACE).map(|(at, _)| at).collect();
        Self {
            bytes: text.into_bytes(),
            places,
        }
    }

    fn write(&self, number: u64, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend_from_slice(&self.bytes);
        let digits = format!("{number:016}");
        for place in &self.places {
            let place = begin + place;
            out[place..place + digits.len()].copy_from_slice(digits.as_bytes());
        }
    }
}

/// The bodies of one dialect, size and delivery.
pub(super) struct Bodies {
    head: Piece,
    step: Piece,
    foot: &'static str,
}

impl Bodies {
    /// Bodies of `size` bytes on average over the turns of a try (or the smallest possible).
    pub(super) fn new(dialect: Dialect, model: &str, size: usize, delivery: Delivery) -> Self {
        let mut plan = Plan::new(size);
        let step = Piece::new(plan.step(dialect));
        let foot = "]}";
        let of_turns = step.bytes.len() * (TURNS as usize + 1) / 2 + foot.len();
        let spare = |plan: &Plan| {
            let head = plan.head(dialect, model, delivery);
            size.checked_sub(head.len() + of_turns)
        };
        while let Some(spare) = spare(&plan)
            && spare >= step.bytes.len()
        {
            plan.opening_steps += 1;
        }
        // The task takes what rounding leaves; its filler needs no escapes.
        plan.task_bytes += spare(&plan).unwrap_or(0);
        let head = Piece::new(plan.head(dialect, model, delivery));
        Self { head, step, foot }
    }

    /// The body of an agent's `request`th request. `new` tells its steps from those of any other.
    pub(super) fn body(&self, agent: u64, new: u64, request: u64) -> Bytes {
        let mut out = Vec::with_capacity(
            self.head.bytes.len() + self.step.bytes.len() * TURNS as usize + self.foot.len(),
        );
        self.head.write(agent, &mut out);
        let (tried, turn) = (request / TURNS * TURNS, request % TURNS);
        for step in 0..=turn {
            self.step.write(new + tried + step, &mut out);
        }
        out.extend_from_slice(self.foot.as_bytes());
        Bytes::from(out)
    }
}

/// What a conversation is made of, before its dialect.
struct Plan {
    system: String,
    tools: Vec<Tool>,
    task: String,
    task_bytes: usize,
    result: String,
    opening_steps: usize,
}

struct Tool {
    name: String,
    description: String,
    parameters: Value,
}

impl Plan {
    /// Shares as agents have them: two fifths tools, a seventh system prompt, the rest history.
    fn new(size: usize) -> Self {
        let mut random = StdRng::seed_from_u64(size as u64);
        let tools = (size / 4096).clamp(2, 20);
        let tool_bytes = size * 2 / 5 / tools;
        let task = prose(&mut random, size);
        Self {
            system: prose(&mut random, size / 7),
            tools: (0..tools)
                .map(|number| tool(&mut random, number, tool_bytes))
                .collect(),
            task,
            task_bytes: 40,
            result: listing(&mut random, (size / 64).clamp(160, 1200)),
            opening_steps: 0,
        }
    }

    /// Everything up to the end of the opening.
    fn head(&self, dialect: Dialect, model: &str, delivery: Delivery) -> String {
        let model = Value::from(model);
        let stream = delivery == Delivery::Stream;
        let system = Value::from(self.system.as_str());
        let tools: Vec<Value> = self.tools.iter().map(|tool| tool.in_(dialect)).collect();
        let tools = Value::from(tools);
        let task = format!("Task {PLACE}: {}", &self.task[..self.task_bytes]);
        let begin = match dialect {
            Dialect::Chat => {
                let options = if stream {
                    r#","stream_options":{"include_usage":true}"#
                } else {
                    ""
                };
                let system = json!({"role": "system", "content": system});
                let user = json!({"role": "user", "content": task});
                format!(
                    r#"{{"model":{model},"stream":{stream}{options},"max_completion_tokens":4096,"tools":{tools},"messages":[{system},{user}"#
                )
            }
            Dialect::Messages => {
                let system = json!([{"type": "text", "text": system}]);
                let user = json!({"role": "user", "content": [{"type": "text", "text": task}]});
                format!(
                    r#"{{"model":{model},"stream":{stream},"max_tokens":4096,"system":{system},"tools":{tools},"messages":[{user}"#
                )
            }
            Dialect::Responses => {
                let user = json!({"type": "message", "role": "user",
                                  "content": [{"type": "input_text", "text": task}]});
                format!(
                    r#"{{"model":{model},"stream":{stream},"store":false,"max_output_tokens":4096,"instructions":{system},"tools":{tools},"input":[{user}"#
                )
            }
        };
        // The opening's steps differ from agent to agent by the agent's number.
        begin + &self.step(dialect).repeat(self.opening_steps)
    }

    /// One step, with the comma before it.
    fn step(&self, dialect: Dialect) -> String {
        let say = format!("Step {PLACE}: now the next file, then its tests.");
        let call = format!("call_{PLACE}");
        let arguments = format!(r#"{{"path":"src/part_{PLACE}.rs","from_line":1}}"#);
        let name = &self.tools[0].name;
        let result = format!("part {PLACE}\n{}", self.result);
        let items = match dialect {
            Dialect::Chat => vec![
                json!({"role": "assistant", "content": say, "tool_calls": [
                    {"id": call, "type": "function",
                     "function": {"name": name, "arguments": arguments}}]}),
                json!({"role": "tool", "tool_call_id": call, "content": result}),
            ],
            Dialect::Messages => {
                let input: Value = serde_json::from_str(&arguments).unwrap_or_default();
                vec![
                    json!({"role": "assistant", "content": [
                        {"type": "text", "text": say},
                        {"type": "tool_use", "id": call, "name": name, "input": input}]}),
                    json!({"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": call, "content": result}]}),
                ]
            }
            Dialect::Responses => vec![
                json!({"type": "message", "role": "assistant", "id": format!("msg_{PLACE}"),
                       "status": "completed",
                       "content": [{"type": "output_text", "text": say, "annotations": []}]}),
                json!({"type": "function_call", "call_id": call, "name": name,
                       "arguments": arguments}),
                json!({"type": "function_call_output", "call_id": call, "output": result}),
            ],
        };
        items.iter().map(|item| format!(",{item}")).collect()
    }
}

impl Tool {
    fn in_(&self, dialect: Dialect) -> Value {
        let (name, description) = (&self.name, &self.description);
        let parameters = &self.parameters;
        match dialect {
            Dialect::Chat => json!({"type": "function", "function":
                {"name": name, "description": description, "parameters": parameters}}),
            Dialect::Messages => {
                json!({"name": name, "description": description, "input_schema": parameters})
            }
            Dialect::Responses => json!({"type": "function", "name": name, "strict": false,
                "description": description, "parameters": parameters}),
        }
    }
}

/// A tool of about so many bytes, half of them its description.
fn tool(random: &mut StdRng, number: usize, bytes: usize) -> Tool {
    let description = prose(random, bytes / 2);
    let parameters = (bytes / 2 / 160).max(2);
    let properties: serde_json::Map<String, Value> = (0..parameters)
        .map(|at| {
            let about = prose(random, 80);
            let schema = match at % 3 {
                0 => json!({"type": "string", "description": about}),
                1 => json!({"type": "integer", "minimum": 1, "description": about}),
                _ => json!({"type": "array", "items": {"type": "string"}, "description": about}),
            };
            let name = ["path", "from_line", "patterns"][at % 3];
            let name = if at < 3 {
                name.to_owned()
            } else {
                format!("{name}_{at}")
            };
            (name, schema)
        })
        .collect();
    Tool {
        name: format!("tool_{number}"),
        description,
        parameters: json!({"type": "object", "properties": properties,
                           "required": ["path"], "additionalProperties": false}),
    }
}

/// Sentences of exactly so many bytes.
fn prose(random: &mut StdRng, bytes: usize) -> String {
    // A token of them has at least two bytes.
    let mut text = workload::words(random, bytes / 2 + 1);
    text.truncate(bytes);
    text
}

/// Lines as tools print them, with the line ends and quotes that JSON must escape; of exactly so
/// many bytes.
fn listing(random: &mut StdRng, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 80);
    for number in 1.. {
        if text.len() >= bytes {
            break;
        }
        text += &format!("{number:>4}  let part = \"{}\";\n", prose(random, 40));
    }
    text.truncate(bytes);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Dialect; 3] = [Dialect::Chat, Dialect::Messages, Dialect::Responses];

    fn items(body: &Bytes, dialect: Dialect) -> Vec<Value> {
        let mut value: Value = serde_json::from_slice(body).expect("JSON");
        let name = match dialect {
            Dialect::Responses => "input",
            _ => "messages",
        };
        serde_json::from_value(value[name].take()).expect("a list")
    }

    /// Catches bodies of another size than the row says.
    #[test]
    fn bodies_have_the_wanted_size_on_average() {
        for dialect in ALL {
            for size in [4096, 65_536] {
                let bodies = Bodies::new(dialect, "m", size, Delivery::Whole);
                let sizes = (0..TURNS).map(|turn| bodies.body(1, 100, turn).len());
                let mean = sizes.sum::<usize>() / TURNS as usize;
                assert!(mean.abs_diff(size) <= 2, "{dialect:?} {size}: {mean}");
            }
        }
    }

    /// Catches a turn that does not continue the one before it, and steps that come twice.
    #[test]
    fn turns_extend_what_was_sent_and_are_new() {
        for dialect in ALL {
            let bodies = Bodies::new(dialect, "m", 4096, Delivery::Stream);
            let turns: Vec<_> = (0..2 * TURNS)
                .map(|n| items(&bodies.body(7, 100, n), dialect))
                .collect();
            let opening = turns[0].len() - turns[1].len().abs_diff(turns[0].len());
            let mut last = std::collections::HashSet::new();
            for (n, turn) in turns.iter().enumerate() {
                let before = match n as u64 % TURNS {
                    0 => &turns[0][..opening],
                    _ => &turns[n - 1][..],
                };
                assert_eq!(&turn[..before.len()], before, "{dialect:?} {n}");
                assert!(last.insert(turn.last().map(ToString::to_string)));
            }
        }
    }
}
