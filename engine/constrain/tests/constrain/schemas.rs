//! JSON schemas of the kinds that agents' tools have, made up from a seed.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value, json};

const NAMES: &[&str] = &[
    "path",
    "query",
    "limit",
    "city",
    "unit",
    "title",
    "tags",
    "due_date",
    "owner",
    "priority",
    "body",
    "recursive",
    "encoding",
    "offset",
    "x",
    "is_done",
    "metadata",
    "start-line",
    "Ünit",
    "file \"name\"",
];
const WORDS: &[&str] = &[
    "low",
    "medium",
    "high",
    "celsius",
    "fahrenheit",
    "read",
    "write",
    "append",
    "a b",
    "naïve",
    "open",
    "closed",
    "in_progress",
    "\"quoted\"",
    "",
];

/// Makes schemas, the same ones for the same seed.
pub(crate) struct Schemas {
    random: StdRng,
    /// Whether every object is closed and names all of its properties as required, as OpenAI's
    /// strict mode has it.
    strict: bool,
}

impl Schemas {
    /// Schemas of this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: StdRng::seed_from_u64(seed),
            strict: false,
        }
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.random.random_range(0..of.len())]
    }

    fn chance(&mut self, of_ten: u32) -> bool {
        self.random.random_range(0..10) < of_ten
    }

    /// The schema of an object, as a tool's parameters are.
    pub(crate) fn object(&mut self) -> Value {
        self.strict = self.chance(5);
        let mut schema = self.object_of(0);
        if self.chance(3) {
            self.add_definitions(&mut schema);
        }
        schema
    }

    fn add_definitions(&mut self, schema: &mut Value) {
        let label = self.scalar();
        let tree = json!({
            "type": "object",
            "properties": {
                "label": label,
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 3},
            },
            "required": ["label", "children"],
            "additionalProperties": false,
        });
        let list = json!({
            "type": "object",
            "properties": {
                "value": self.scalar(),
                "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": false,
        });
        schema["$defs"] = json!({"tree": tree, "list": list});
        let target = self.one(&["tree", "list"]);
        let reference = json!({"$ref": format!("#/$defs/{target}")});
        schema["properties"]["linked"] = reference;
        let wanted = self.strict || self.chance(5);
        if let (true, Some(required)) = (wanted, schema["required"].as_array_mut()) {
            required.push(json!("linked"));
        }
    }

    fn object_of(&mut self, depth: usize) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for _ in 0..self.random.random_range(1..=5) {
            let name = self.one(NAMES);
            if properties.contains_key(name) {
                continue;
            }
            properties.insert(name.to_owned(), self.any(depth + 1));
            if self.strict || self.chance(5) {
                required.push(json!(name));
            }
        }
        let mut schema = json!({"type": "object", "properties": properties, "required": required});
        if self.strict || self.chance(6) {
            schema["additionalProperties"] = json!(false);
        } else if self.chance(3) {
            schema["additionalProperties"] = self.scalar();
        }
        if self.chance(3) {
            schema["description"] = json!("What it is for.");
        }
        schema
    }

    fn any(&mut self, depth: usize) -> Value {
        if depth > 3 {
            return self.scalar();
        }
        match self.random.random_range(0..10) {
            0 | 1 => self.object_of(depth),
            2 | 3 => self.array(depth),
            4 => self.union(depth),
            _ => self.scalar(),
        }
    }

    fn array(&mut self, depth: usize) -> Value {
        let mut schema = json!({"type": "array", "items": self.any(depth + 1)});
        if self.chance(4) {
            schema["minItems"] = json!(self.random.random_range(0..3));
        }
        if self.chance(5) {
            schema["maxItems"] = json!(self.random.random_range(3..6));
        }
        schema
    }

    fn union(&mut self, depth: usize) -> Value {
        match self.random.random_range(0..4) {
            0 => {
                let name = self.one(&["string", "integer", "boolean", "number"]);
                json!({"type": [name, "null"]})
            }
            1 => json!({"anyOf": [self.any(depth + 1), {"type": "null"}]}),
            2 => {
                json!({"anyOf": [self.object_of(depth + 1), self.array(depth + 1), {"type": "string"}]})
            }
            _ => {
                let branch = |kind: &str, inner: Value| {
                    json!({
                        "type": "object",
                        "properties": {"kind": {"const": kind}, "value": inner},
                        "required": ["kind", "value"],
                        "additionalProperties": false,
                    })
                };
                let first = branch("first", self.any(depth + 1));
                let second = branch("second", self.any(depth + 1));
                json!({"oneOf": [first, second]})
            }
        }
    }

    /// A schema without parts.
    pub(crate) fn scalar(&mut self) -> Value {
        match self.random.random_range(0..12) {
            0 | 1 => json!({"type": "string"}),
            2 => {
                json!({"type": "string", "minLength": self.random.random_range(0..12), "maxLength": self.random.random_range(12..40)})
            }
            3 => json!({"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3}$"}),
            4 => {
                let format = self.one(&["date", "date-time", "uuid", "email", "ipv4"]);
                json!({"type": "string", "format": format})
            }
            5 => {
                let mut words: Vec<&str> = (0..4).map(|_| self.one(WORDS)).collect();
                words.sort_unstable();
                words.dedup();
                json!({"type": "string", "enum": words})
            }
            6 => json!({"enum": [1, "two", null, 3.5, false]}),
            7 => {
                json!({"type": "integer", "minimum": self.random.random_range(-20..20), "maximum": self.random.random_range(20..3000)})
            }
            8 => json!({"type": "integer"}),
            9 => json!({"type": "number", "minimum": 0, "maximum": 1}),
            10 => json!({"type": "boolean"}),
            _ => json!({"const": self.one(WORDS)}),
        }
    }
}
