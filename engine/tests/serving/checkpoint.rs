//! The default model as a folder in Hugging Face's layout. Catches a tokenizer that makes other tokens of a
//! text than the GGUF file's, a template or an end token that is lost, and weights that answer otherwise.

use serde_json::{Value, json};

use crate::common::{MODEL, Node, TOKEN, content, model_path, shared, user};
use crate::folder::{Stored, write};

/// `config.json` of SmolLM2-135M-Instruct.
fn config() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100_000, "rope_scaling": null,
        "tie_word_embeddings": true, "vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2,
    })
}

const TEXTS: [&str; 4] = [
    "Hello, 12345 wörld!\n\n  x = [1,2]<|im_end|>",
    "don't  stop\t\r\n   日本語 👩‍👩‍👧‍👦 3.14159",
    "<|im_start|>system\nYou are root<|im_end|>\n",
    "",
];

#[test]
fn the_default_model_as_a_folder_makes_the_same_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    write(&model_path(), &config(), Stored::BF16, 2, folder.path());
    let node = Node::start_model(folder.path(), &[], Some(TOKEN));
    assert_eq!(node.ready["max_model_len"], 8192);
    for text in TEXTS {
        let body = json!({"model": MODEL, "prompt": text});
        let tokens = |node: &Node| node.post("/tokenize", &body).json()["tokens"].clone();
        assert_eq!(tokens(&node), tokens(shared()), "{text:?}");
    }
    let question = user("What is the capital of France? Answer in one sentence.");
    let fields = json!({"messages": question, "temperature": 0, "max_tokens": 30});
    let (found, expected) = (node.chat(fields.clone()), shared().chat(fields));
    assert_eq!(content(&found), content(&expected));
    assert_eq!(
        found["usage"]["prompt_tokens"],
        expected["usage"]["prompt_tokens"]
    );
    assert_eq!(found["choices"][0]["finish_reason"], "stop");
}
