//! Arguments of `reef eval` that cannot be meant: refused before a model is opened, never a panic.

use std::process::Command;

#[test]
fn numbers_out_of_range_are_refused_with_the_range() {
    let refused = [
        ("stream --tokens 99999999999999", "--tokens is 99999999999999: want 2 to"),
        ("stream --tokens 18446744073709551615", "want 2 to"),
        ("stream --tokens 1", "--tokens is 1: want 2 to"),
        ("ladder --context 64 --switch 18446744073709551615", "want less than --context 64"),
        ("ladder --context 64 --switch 64", "--switch is 64: want less than --context 64"),
    ];
    for (arguments, said) in refused {
        let ran = Command::new(env!("CARGO_BIN_EXE_reef"))
            .args(["eval"])
            .args(arguments.split_whitespace())
            .args(["no-such-model.gguf", "--text", "no-such-text.txt"])
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{arguments}: {errors}");
        assert!(errors.contains(said) && errors.lines().count() == 1, "{arguments}: {errors}");
    }
}
