//! Only what is new is tokenized: catches a turn that encodes again what was sent before, in any
//! dialect, and a conversation that changes its dialect and is encoded anew.

use serde_json::{Value, json};

use crate::support::Gateway;
use crate::support::node::{MODEL, Node};

#[derive(Clone, Copy, Debug)]
enum Surface {
    Chat,
    Messages,
    Responses,
}

const ALL: [Surface; 3] = [Surface::Chat, Surface::Messages, Surface::Responses];

/// The system prompt, the task, then steps of a call and its result, at most so many.
struct Conversation {
    system: String,
    steps: usize,
}

impl Conversation {
    /// Words that no other conversation has, longer than what is too short to remember.
    fn text(&self, what: &str, number: usize) -> String {
        let own = &self.system;
        format!("{what} {number} {own}: the quick tool reads file {number} and says so. ").repeat(9)
    }

    fn step(&self, number: usize) -> (String, Value, String) {
        let say = self.text("now", number);
        let arguments =
            json!({"path": format!("src/{number}.rs"), "why": self.text("for", number)});
        (say, arguments, self.text("found", number))
    }

    fn body(&self, surface: Surface) -> Value {
        let parameters = json!({"type": "object", "properties": {
            "path": {"type": "string", "description": self.text("path", 0)},
            "why": {"type": "string"}}});
        let description = self.text("reads", 0);
        let (system, task) = (self.text("you are", 0), self.text("task", 0));
        let steps = (0..self.steps).map(|number| (number, self.step(number)));
        match surface {
            Surface::Chat => {
                let mut messages = vec![
                    json!({"role": "system", "content": system}),
                    json!({"role": "user", "content": task}),
                ];
                messages.extend(steps.flat_map(|(number, (say, arguments, found))| {
                    let id = format!("call_{number}");
                    [
                        json!({"role": "assistant", "content": say, "tool_calls": [{"id": id,
                            "type": "function", "function": {"name": "read",
                            "arguments": arguments.to_string()}}]}),
                        json!({"role": "tool", "tool_call_id": id, "content": found}),
                    ]
                }));
                json!({"model": MODEL, "messages": messages, "tools": [{"type": "function",
                    "function": {"name": "read", "description": description,
                                 "parameters": parameters}}]})
            }
            Surface::Messages => {
                let mut messages = vec![json!({"role": "user", "content": task})];
                messages.extend(steps.flat_map(|(number, (say, arguments, found))| {
                    let id = format!("call_{number}");
                    [
                        json!({"role": "assistant", "content": [{"type": "text", "text": say},
                            {"type": "tool_use", "id": id, "name": "read", "input": arguments}]}),
                        json!({"role": "user", "content": [
                            {"type": "tool_result", "tool_use_id": id, "content": found}]}),
                    ]
                }));
                json!({"model": MODEL, "max_tokens": 100, "system": system, "messages": messages,
                    "tools": [{"name": "read", "description": description,
                               "input_schema": parameters}]})
            }
            Surface::Responses => {
                let mut input = vec![json!({"role": "user", "content": task})];
                input.extend(steps.flat_map(|(number, (say, arguments, found))| {
                    let id = format!("call_{number}");
                    [
                        json!({"type": "message", "role": "assistant",
                            "content": [{"type": "output_text", "text": say}]}),
                        json!({"type": "function_call", "call_id": id, "name": "read",
                            "arguments": arguments.to_string()}),
                        json!({"type": "function_call_output", "call_id": id, "output": found}),
                    ]
                }));
                json!({"model": MODEL, "store": false, "instructions": system, "input": input,
                    "tools": [{"type": "function", "name": "read", "description": description,
                               "parameters": parameters}]})
            }
        }
    }
}

/// Length of a turn's prompt, and how many of its tokens were encoded.
fn send(gateway: &Gateway, surface: Surface, conversation: &Conversation) -> (u64, u64) {
    let path = match surface {
        Surface::Chat => "/v1/chat/completions",
        Surface::Messages => "/v1/messages",
        Surface::Responses => "/v1/responses",
    };
    let encoded = || {
        let series = format!("homing_prompt_tokens_total{{known=\"no\",model=\"{MODEL}\"}}");
        gateway.metric(&series) as u64
    };
    let before = encoded();
    let body = conversation.body(surface).to_string();
    let answer = gateway.post(path, &["x-homing-debug: 1"], body.as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.text());
    let prompt = answer.header("x-homing-prompt-tokens").unwrap();
    (prompt.parse().unwrap(), encoded() - before)
}

#[test]
fn a_turn_encodes_only_its_new_part_in_every_dialect() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    for surface in ALL {
        let mut conversation = Conversation {
            system: format!("{surface:?}"),
            steps: 0,
        };
        let (mut known, encoded) = send(&gateway, surface, &conversation);
        assert!(encoded > known * 9 / 10, "{encoded} of {known}");
        for steps in 1..4 {
            conversation.steps = steps;
            let (prompt, encoded) = send(&gateway, surface, &conversation);
            let new = prompt - known;
            // Line ends between messages and the opening of the answer are too short to remember.
            let short = 2 + 2 * steps as u64 + 4;
            assert!(
                (new / 2..=new + short).contains(&encoded),
                "{surface:?}: {encoded} encoded of {new} new, {prompt} in all"
            );
            known = prompt;
        }
        for other in ALL {
            let (prompt, encoded) = send(&gateway, other, &conversation);
            assert_eq!(prompt, known, "{surface:?} then {other:?}");
            assert!(encoded < 20, "{surface:?} then {other:?}: {encoded}");
        }
    }
    gateway.assert_idle();
}
