//! What is printed when everything is ready?
//!
//! For a person: address, key, and two ways to try it that can be pasted. For a script: one line.

use serde_json::json;

use super::nodes::Nodes;
use super::plan::Plan;
use super::{DEMO, UpArgs};
use crate::serve::Server;

/// The line of `--json`.
pub(super) fn json(server: &Server, plan: &Plan, nodes: &Nodes, key: Option<&str>) -> String {
    let rows: Vec<_> = plan
        .nodes
        .iter()
        .enumerate()
        .map(|(number, node)| {
            json!({
                "id": node.id,
                "role": node.role.as_str(),
                "url": format!("http://{}", node.http),
                "pid": nodes.pid(number),
            })
        })
        .collect();
    let line = json!({
        "url": format!("http://{}/v1", server.listen),
        "api_key": key,
        "admin": server.admin.map(|admin| format!("http://{admin}")),
        "pid": std::process::id(),
        "nodes": rows,
        "model": plan.model,
    });
    format!("{line}\n")
}

/// The page for a person.
pub(super) fn text(server: &Server, plan: &Plan, args: &UpArgs, key: Option<&str>) -> String {
    let url = format!("http://{}/v1", server.listen);
    let model = &plan.model;
    let aliases = plan.aliases.join(", ");
    let data = args.data.display();
    // As it was called, so that the commands below can be pasted.
    let homing = std::env::args()
        .next()
        .unwrap_or_else(|| "homing".to_owned());
    let (shown, note) = match key {
        Some(key) => (key.to_owned(), format!("(tenant {DEMO}; shown this once)")),
        None => (
            "$HOMING_API_KEY".to_owned(),
            format!(
                "(set it to the key of your first start, tenant {DEMO}: keys are stored only as \
                 hashes.\n            Another one: {homing} key create --tenant {DEMO} --data {data})"
            ),
        ),
    };
    let python_key = key.map_or_else(
        || "os.environ[\"HOMING_API_KEY\"]".to_owned(),
        |key| format!("\"{key}\""),
    );
    let import = if key.is_some() { "" } else { "import os; " };
    let admin = server
        .admin
        .map_or_else(String::new, |admin| format!("http://{admin}"));
    let count = |number: usize, what: &str| match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    };
    let (nodes, threads) = (
        count(plan.nodes.len(), "node"),
        count(plan.threads, "thread"),
    );
    format!(
        r#"
Homing is ready.  Ctrl-C stops it.

  address   {url}
  API key   {shown}
            {note}
  model     {model}  ({nodes}, {threads} each)
            also as {aliases}
  admin     {admin}/metrics  {admin}/admin/nodes
  bill      {homing} report --data {data} --by session
  logs      {data}/logs

Try it:

curl {url}/chat/completions -H "authorization: Bearer {shown}" \
  -H "content-type: application/json" -H "x-session-affinity: my-first-agent" \
  -d '{{"model": "{model}", "max_tokens": 60, "messages": [{{"role": "user", "content": "Hello!"}}]}}'

{import}from openai import OpenAI
client = OpenAI(base_url="{url}", api_key={python_key})
print(client.chat.completions.create(model="{model}", max_tokens=60, messages=[{{"role": "user", "content": "Hello!"}}]).choices[0].message.content)

"#
    )
}
