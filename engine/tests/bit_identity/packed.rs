//! Does a model that maps packed weights answer as one that packs them?
//!
//! Would catch matrices that are written in another order than they are asked for, parts of one rank
//! taken for another's, a file that is damaged or another's and used all the same, and a start that
//! fails because packed weights cannot be kept.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use engine::model::{Model, ModelFile, ModelOptions, OpsKind, Variant};
use engine::parallel::RankGroup;

use super::tiny::{self, Noise, Tiny};
use super::{BLOCKS, SEQUENCES, alone, load, prompts};

const OPTIONS: ModelOptions = ModelOptions {
    ops: OpsKind::Cpu,
    threads: 2,
    kv_blocks: BLOCKS * SEQUENCES,
};

/// A small model in a folder of its own, where its packed weights go too.
struct Kept {
    folder: tempfile::TempDir,
    model: PathBuf,
}

impl Kept {
    fn new(seed: u64) -> Kept {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model.gguf");
        fs::write(&model, Tiny::new(seed).to_bytes()).expect("room for a small model");
        Kept { folder, model }
    }

    fn file(&self) -> ModelFile {
        kept(&self.model, None)
    }

    fn load(&self, variant: Variant) -> Model {
        Model::load_on(variant, &self.file(), &OPTIONS, &mut |_| ()).expect("the model loads")
    }

    fn packed(&self) -> PathBuf {
        self.folder.path().join("model.gguf.packed")
    }

    fn inode(&self) -> u64 {
        fs::metadata(self.packed()).expect("it is kept").ino()
    }
}

fn kept(model: &Path, folder: Option<&Path>) -> ModelFile {
    let mut file = ModelFile::open(model).expect("the model opens");
    file.keep_packed(folder);
    file
}

/// Whether this process has a file mapped.
fn is_mapped(path: &Path) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").expect("Linux tells");
    let path = path.canonicalize().expect("it is there");
    maps.contains(&*path.to_string_lossy())
}

#[test]
fn mapped_weights_answer_as_packed_ones() {
    let kept = Kept::new(7);
    let prompts = prompts(&mut Noise(51), tiny::VOCAB, &[1, 40, 100]);
    let expected = alone(&mut load(&kept.model, Variant::best(), 2), &prompts);
    assert!(!kept.packed().exists(), "nobody asked for it");
    assert!(alone(&mut kept.load(Variant::best()), &prompts) == expected);
    let first = kept.inode();
    for variant in Variant::ALL.into_iter().filter(|v| v.is_available()) {
        let mut model = kept.load(variant);
        assert!(is_mapped(&kept.packed()), "{}", variant.as_str());
        assert!(
            alone(&mut model, &prompts) == expected,
            "{}",
            variant.as_str()
        );
        assert_eq!(kept.inode(), first, "what is good is not written again");
    }
    assert_eq!(
        fs::read_dir(kept.folder.path()).expect("readable").count(),
        2
    );
}

/// Its matrices have one format, so that a wrong order would not be seen by their sizes.
#[test]
fn the_default_model_answers_the_same_from_packed_weights() {
    let default = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let prompts = prompts(&mut Noise(52), 49_152, &[20]);
    let expected = alone(&mut load(default.as_ref(), Variant::best(), 2), &prompts);
    for _ in 0..2 {
        let file = kept(default.as_ref(), Some(folder.path()));
        let mut model = Model::load(&file, &OPTIONS, &mut |_| ()).expect("the model loads");
        assert!(alone(&mut model, &prompts) == expected);
    }
    let mut names = fs::read_dir(folder.path()).expect("readable");
    let only = names.next().expect("it is kept").expect("readable").path();
    assert!(names.next().is_none());
    let file = kept(default.as_ref(), Some(folder.path()));
    let _model = Model::load(&file, &OPTIONS, &mut |_| ()).expect("the model loads");
    assert!(is_mapped(&only));
}

#[test]
fn what_is_damaged_or_anothers_is_made_anew() {
    let kept = Kept::new(7);
    let prompts = prompts(&mut Noise(53), tiny::VOCAB, &[30]);
    let expected = alone(&mut kept.load(Variant::best()), &prompts);
    let whole = fs::read(kept.packed()).expect("it is kept");
    let mut flipped = whole.clone();
    let last = flipped.len() - 1;
    flipped[last] ^= 1;
    let other = Kept::new(8);
    drop(other.load(Variant::best()));
    let others = fs::read(other.packed()).expect("it is kept");
    for (what, bytes) in [
        ("a flipped bit", &flipped[..]),
        ("half of it", &whole[..whole.len() / 2]),
        ("nothing", &[][..]),
        ("another model's", &others[..]),
    ] {
        fs::write(kept.packed(), bytes).expect("writable");
        assert!(
            alone(&mut kept.load(Variant::best()), &prompts) == expected,
            "{what}"
        );
        assert!(
            fs::read(kept.packed()).expect("readable") == whole,
            "{what}"
        );
    }
    // The model itself is another one now, under the same name.
    fs::copy(&other.model, &kept.model).expect("writable");
    let expected = alone(&mut load(&other.model, Variant::best(), 2), &prompts);
    assert!(alone(&mut kept.load(Variant::best()), &prompts) == expected);
}

#[test]
fn a_place_that_cannot_be_written_costs_only_the_time_to_pack() {
    let kept = Kept::new(7);
    let prompts = prompts(&mut Noise(54), tiny::VOCAB, &[30]);
    let expected = alone(&mut load(&kept.model, Variant::best(), 2), &prompts);
    // A folder in the place of the file; nobody's rights matter here, as tests may run as root.
    fs::create_dir_all(kept.packed().join("in the way")).expect("writable");
    assert!(alone(&mut kept.load(Variant::best()), &prompts) == expected);
    assert_eq!(
        fs::read_dir(kept.folder.path()).expect("readable").count(),
        2,
        "no part is left"
    );
    let file = self::kept(&kept.model, Some(&kept.folder.path().join("gone")));
    let mut model = Model::load(&file, &OPTIONS, &mut |_| ()).expect("the model loads");
    assert!(alone(&mut model, &prompts) == expected);
}

#[test]
fn those_who_pack_at_once_do_not_disturb_each_other() {
    let kept = Kept::new(7);
    let prompts = prompts(&mut Noise(55), tiny::VOCAB, &[30]);
    let expected = alone(&mut load(&kept.model, Variant::best(), 2), &prompts);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    let mut model = kept.load(Variant::best());
                    assert!(alone(&mut model, &prompts) == expected);
                    // Others may have it mapped, or be about to.
                    let _ = fs::remove_file(kept.packed());
                }
            });
        }
    });
}

#[test]
fn every_rank_keeps_its_own() {
    let kept = Kept::new(7);
    for _ in 0..2 {
        RankGroup::in_process(2, &kept.file(), &OPTIONS).expect("two ranks");
    }
    let name = |rank: usize| format!("model.gguf.{rank}of2.packed");
    let sizes = [0, 1].map(|rank| {
        let path = kept.folder.path().join(name(rank));
        fs::metadata(path).expect("it is kept").len()
    });
    assert!(sizes.iter().all(|size| *size > 0));
    // A group of one does not take a part for the whole.
    let prompts = prompts(&mut Noise(56), tiny::VOCAB, &[30]);
    let expected = alone(&mut load(&kept.model, Variant::best(), 2), &prompts);
    assert!(alone(&mut kept.load(Variant::best()), &prompts) == expected);
}
