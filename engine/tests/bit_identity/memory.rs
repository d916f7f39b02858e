//! Is the memory of a pass what was said beforehand?

use engine::model::{Model, Pass, PassOutput, SeqInput, Variant};

use super::tiny::Tiny;
use super::{blocks, file_of, load};

/// Would catch a buffer that the estimate forgets, one that grows by doubling, and partial results
/// of attention that grow with rows times context.
#[test]
fn scratch_stays_below_what_was_said() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut model = load(file.path(), Variant::best(), 2);
    let table = blocks(0);
    let tokens: Vec<u32> = (0..600).map(|token| token % 101).collect();
    let mut most = 0;
    for (start, count, rows) in [
        (0, 1, 1),
        (1, 30, 3),
        (31, 29, 29),
        (60, 500, 0),
        (560, 40, 2),
    ] {
        let batch = [SeqInput {
            tokens: &tokens[start..start + count],
            start,
            blocks: &table,
            logits_last: rows,
        }];
        let pass = Pass {
            batch: &batch,
            capture: &[],
        };
        let mut output = PassOutput::default();
        model.run(&pass, &mut output).expect("a correct pass");
        most = most.max(count);
        let logits = size_of::<f32>() * output.logits.capacity();
        let held = model.scratch_held() + logits;
        let said = Model::scratch_bytes(model.shape(), most, 29);
        println!("{count} tokens at {start}: {held} bytes held, {said} said");
        assert!(held <= said, "{held} bytes held, {said} said");
    }
    let (held, said) = (
        model.scratch_held(),
        Model::scratch_bytes(model.shape(), 500, 29),
    );
    assert!(said <= 3 * held, "{held} bytes held, {said} said");
}
