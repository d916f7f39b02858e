//! What is sent, and in which order?

use std::time::Duration;

use super::converse::{Check, Conversation, Tenant};
use crate::error::LoadError;
use crate::workload::{self, Session, Shape};

/// The step whose prompts differ on purpose.
pub(super) const CONTROL_TEXT: &str = "control text";

/// The first turn after the cache was cleared: vLLM tells of it with its next step, which is this
/// turn's.
pub(super) const FIRST_CLEARED: &str = "first cleared";

/// Tokens that a prompt's last block is tried to end with, one by one.
const RESIDUES: usize = 32;
/// Fresh prompts that push a copy out; a pool of 1000 blocks needs fewer.
const PUSHES_MAX: usize = 200;

/// Texts over which tokenizers differ.
const ODD: &[&str] = &[
    "1234567890 3.14159 1e-7 0x1F 2026-11-30T07:00:00Z 12,345.67",
    "Grüße aus Köln: naïve façade, Ångström, e\u{301} e\u{0301}\u{0323}, ﬁne, Straße",
    "日本語のテキスト、한국어 텍스트，中文文本。 مرحبا بالعالم שלום עולם हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 and \u{200b}zero\u{200d}width\u{feff}",
    "fn main() {\n\tlet x = vec![1, 2, 3];\n\n\n    println!(\"{:?}\", x);   \n}\n",
    "trailing spaces   \n\n\n  leading\ttabs\t\t\r\nand CRLF\r\n \u{a0}\u{2003}\u{3000}end ",
    "don't can't we'll I'VE they'RE o'clock ''quoted'' 'S 'Tis",
    "{\"tool\":\"read_file\",\"arguments\":{\"path\":\"/etc/hosts\",\"limit\":10,\"x\":null}}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "==== ---- ____ **** //// \\\\\\\\ #### ???!!!...;;; <<<>>> ((([[[{{{",
];

/// Everything, in order.
pub(super) async fn all(check: &mut Check) -> Result<(), LoadError> {
    let mut first = growing(check).await?;
    evicting(check, &mut first).await?;
    odd_text(check).await?;
    control_text(check).await?;
    residues(check).await?;
    copies(check).await?;
    strangers(check).await?;
    cleared(check).await?;
    at_once(check).await?;
    restarted(check).await
}

fn shape(check: &Check, sessions: usize, turns: usize, seed: u64) -> Shape {
    Shape {
        sessions,
        turns,
        rate: 1.0,
        system_prompts: 2,
        system_tokens: 400,
        message_tokens: 100,
        think: Duration::ZERO,
        subagents: 0,
        seed: check.args.seed.wrapping_mul(1000).wrapping_add(seed),
    }
}

fn open(sessions: &[Session]) -> Vec<Conversation> {
    let open = |session: &Session| Conversation::new(Tenant::First, &session.id, &session.system);
    sessions.iter().map(open).collect()
}

/// Sessions take turns; all of it fits into the pool.
async fn growing(check: &mut Check) -> Result<Vec<Conversation>, LoadError> {
    check.say("growing turns");
    let sessions = workload::plan(&shape(check, check.args.sessions, check.args.turns, 1));
    let mut open = open(&sessions);
    for turn in 0..check.args.turns {
        for (session, conversation) in sessions.iter().zip(&mut open) {
            conversation.says(&session.turns[turn].message);
            check.alone("growing", conversation).await?;
        }
    }
    Ok(open)
}

/// More sessions than the pool holds; then the first ones go on.
async fn evicting(check: &mut Check, first: &mut [Conversation]) -> Result<(), LoadError> {
    check.say("more sessions than the pool holds");
    let more = (check.args.blocks * 32 / 400).max(4);
    let sessions = workload::plan(&shape(check, more, 1, 2));
    for (session, mut conversation) in sessions.iter().zip(open(&sessions)) {
        conversation.says(&session.turns[0].message);
        check.alone("evicting", &mut conversation).await?;
    }
    for round in 0..2 {
        for conversation in first.iter_mut() {
            conversation.says(&format!("Go on with step {round}, please."));
            check.alone("evicting", conversation).await?;
        }
    }
    Ok(())
}

/// Texts over which tokenizers differ, each with a second turn.
async fn odd_text(check: &mut Check) -> Result<(), LoadError> {
    check.say("odd text");
    for (at, text) in ODD.iter().enumerate() {
        let mut conversation = Conversation::new(Tenant::First, &format!("odd-{at}"), text);
        for word in ["Read this", "And once more"] {
            conversation.says(&format!("{word}: {text}"));
            check.alone("odd text", &mut conversation).await?;
        }
    }
    Ok(())
}

/// A message with the text of control tokens: for the gateway it is text.
async fn control_text(check: &mut Check) -> Result<(), LoadError> {
    check.say("text of control tokens");
    let system = workload::plan(&shape(check, 1, 1, 3))[0].system.clone();
    let mut conversation = Conversation::new(Tenant::First, "control", &system);
    conversation.says("What does <|im_end|>\n<|im_start|>system mean in a prompt?");
    for _ in 0..2 {
        // The same prompt again: what vLLM has cached by then, the gateway must not credit.
        check.alone(CONTROL_TEXT, &mut conversation).await?;
        conversation.messages.pop();
    }
    Ok(())
}

/// Prompts of every length modulo a block, each sent twice: the last block of one that ends with a
/// block is held, and computed all the same.
async fn residues(check: &mut Check) -> Result<(), LoadError> {
    check.say("prompts of every length");
    for words in 0..RESIDUES {
        let system = format!("Case {words}.{}", " word".repeat(28 + words));
        let mut conversation =
            Conversation::new(Tenant::First, &format!("length-{words}"), &system);
        conversation.says("Say yes.");
        for _ in 0..2 {
            check.alone("every length", &mut conversation).await?;
            conversation.messages.pop();
        }
    }
    Ok(())
}

/// A prompt that ends with a block is sent three times, so that its last block has copies. Others
/// push one of these out, while a longer prompt builds on the block: it must stay credited.
async fn copies(check: &mut Check) -> Result<(), LoadError> {
    check.say("copies of one block");
    let step = "copies";
    let mut aligned = Conversation::new(Tenant::First, "copies", "Copies of one block.");
    aligned.says("One");
    while !check.count(&aligned).await?.is_multiple_of(32) {
        let last = aligned.messages.last_mut();
        if let Some(Some(text)) = last.map(|message| message["content"].as_str().map(str::to_owned))
        {
            aligned.messages.pop();
            aligned.says(&format!("{text} word"));
        }
    }
    let mut longer = aligned.clone();
    let mut prompt = Vec::new();
    for _ in 0..3 {
        longer = aligned.clone();
        prompt = check.alone(step, &mut longer).await?.prompt;
    }
    let copies = |check: &Check| {
        let account = check.history().account();
        account.copies_at(check.salt(Tenant::First), &prompt, prompt.len())
    };
    let before = copies(check);
    if before < 2 {
        check.fault(format!(
            "an aligned prompt sent three times left {before} copies"
        ));
    }
    longer.says("And what builds on it?");
    check.alone(step, &mut longer.clone()).await?;
    for push in 0..PUSHES_MAX {
        if copies(check) < before {
            break;
        }
        // Little by little, and the longer prompt is used again: only copies grow old.
        let text = format!("Push {push}:{}", " other".repeat(150));
        let mut other = Conversation::new(Tenant::First, &format!("push-{push}"), &text);
        other.says("Say yes.");
        check.alone(step, &mut other).await?;
        check.alone(step, &mut longer.clone()).await?;
    }
    let after = copies(check);
    if after == 0 || after >= before {
        check.fault(format!(
            "{before} copies became {after}: the step has shown nothing"
        ));
    }
    check.alone(step, &mut longer).await.map(drop)
}

/// Another tenant's prompt and one that goes past the gateway, word for word: nobody's cache serves
/// another.
async fn strangers(check: &mut Check) -> Result<(), LoadError> {
    check.say("another tenant, and past the gateway");
    let session = &workload::plan(&shape(check, 1, 1, 4))[0];
    for tenant in [Tenant::First, Tenant::Second, Tenant::First, Tenant::Second] {
        let mut own = Conversation::new(tenant, &session.id, &session.system);
        own.says(&session.turns[0].message);
        let turn = check.alone("strangers", &mut own).await?;
        let mut direct = Conversation::new(tenant, "direct", &session.system);
        direct.says(&session.turns[0].message);
        let cached = check.past(&direct).await?;
        check.past_hits(cached);
        if turn.prompt.is_empty() {
            check.fault("vLLM does not say the tokens of a prompt".into());
        }
    }
    Ok(())
}

/// A conversation goes on after the cache was cleared.
async fn cleared(check: &mut Check) -> Result<(), LoadError> {
    check.say("a cleared cache");
    let sessions = workload::plan(&shape(check, 2, 3, 5));
    let mut open = open(&sessions);
    for turn in 0..3 {
        if turn == 1 {
            check.clear().await?;
        }
        for (at, (session, conversation)) in sessions.iter().zip(&mut open).enumerate() {
            conversation.says(&session.turns[turn].message);
            let step = match (turn, at) {
                (1, 0) => FIRST_CLEARED,
                _ => "cleared",
            };
            check.alone(step, conversation).await?;
        }
    }
    Ok(())
}

/// Siblings on one system prompt begin and go on at the same time.
async fn at_once(check: &mut Check) -> Result<(), LoadError> {
    check.say("turns at the same time");
    let sessions = workload::plan(&shape(check, 6, 4, 6));
    let mut open = open(&sessions);
    for turn in 0..4 {
        for (session, conversation) in sessions.iter().zip(&mut open) {
            conversation.says(&session.turns[turn].message);
        }
        check.at_once("at once", &mut open).await?;
    }
    // What the burst has left must be known as well as anything else.
    for conversation in &mut open {
        conversation.says("One more step, alone.");
        check.alone("after a burst", conversation).await?;
    }
    Ok(())
}

/// Another process at the same addresses.
async fn restarted(check: &mut Check) -> Result<(), LoadError> {
    check.say("vLLM restarts");
    let sessions = workload::plan(&shape(check, 2, 3, 7));
    let mut open = open(&sessions);
    for turn in 0..3 {
        if turn == 1 {
            check.restart().await?;
        }
        for (session, conversation) in sessions.iter().zip(&mut open) {
            conversation.says(&session.turns[turn].message);
            check.alone("restarted", conversation).await?;
        }
    }
    Ok(())
}
