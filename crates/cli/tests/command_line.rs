//! The program as people call it: JSON shapes, exit codes, one clear line for each error.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::{
    collections::HashMap,
    path::Path,
    process::{Command, Output, Stdio},
};
use tempfile::TempDir;

/// The program in an empty directory, with an empty environment.
struct Attache {
    directory: TempDir,
}

impl Attache {
    fn new() -> Self {
        Self { directory: TempDir::new().expect("a directory") }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.args(arguments).current_dir(self.directory.path()).env_clear().env("HOME", self.directory.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("it starts")
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(arguments);
        let text = String::from_utf8(output.stdout).expect("text");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {text}"))
    }

    /// The one line of an error, and the exit code.
    fn error(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.run(arguments);
        let text = String::from_utf8(output.stderr).expect("text");
        let line = text.lines().find(|line| line.starts_with("error:")).unwrap_or_default().to_owned();
        assert!(!text.contains("panicked"), "{arguments:?}: {text}");
        (output.status.code().expect("no signal"), line)
    }
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn run_prints_a_plan_and_text_and_the_same_text_again() {
    let attache = Attache::new();
    let arguments = ["run", "--json", "--max-tokens", "20", "--prompt", "Once upon a time", "--prompt", "The "];
    let report = attache.json(&arguments);
    assert_eq!(keys(&report), ["plan", "outputs", "stats"]);
    let backends: Vec<&str> =
        report["plan"].as_array().unwrap().iter().map(|p| p["backend"].as_str().unwrap()).collect();
    assert_eq!(backends, ["CPU_ATTN", "CPU_MLA", "CPU_ATTN", "CPU_MLA"]);
    let output = &report["outputs"][0];
    assert_eq!(keys(output)[..4], ["prompt", "prompt_tokens", "tokens", "text"]);
    assert_eq!(output["prompt"], "Once upon a time");
    assert_eq!(output["prompt_tokens"].as_array().unwrap().len(), 17);
    assert_eq!(output["tokens"].as_array().unwrap().len(), 20);
    for rate in ["prefill_tokens_per_s", "decode_tokens_per_s"] {
        assert!(report["stats"][rate].as_f64().unwrap() > 0.0);
    }
    assert_eq!(attache.json(&arguments)["outputs"], report["outputs"]);
    let alone = attache.json(&["run", "--json", "--max-tokens", "20", "--prompt", "The "]);
    assert_eq!(alone["outputs"][0]["text"], report["outputs"][1]["text"], "a prompt's text does not depend on others");

    let sampled = |seed: &str| {
        let temperature = ["--temperature", "1.5", "--seed", seed];
        let arguments = [&["run", "--json", "--max-tokens", "30", "--prompt", "The "][..], &temperature[..]].concat();
        attache.json(&arguments)["outputs"][0]["text"].clone()
    };
    assert_eq!(sampled("3"), sampled("3"));
    assert_ne!(sampled("3"), sampled("4"));

    let output = attache.run(&["run", "--max-tokens", "20", "--prompt", "Once upon a time", "--prompt", "The "]);
    let text = String::from_utf8(output.stdout).expect("text");
    let plan = text.find("mla_attention").expect("the plan");
    let first = text.find("Once upon a time,").expect("the text");
    let rates = text.find("tokens/s").expect("the rates");
    assert!(plan < first && first < rates, "{text}");
}

#[test]
fn explain_has_the_documented_shape_and_obeys_overrides() {
    let attache = Attache::new();
    let explanation = attache.json(&["explain", "--json", "--use-mla", "--head-size", "576"]);
    let expected = ["request", "kind", "wanted", "chosen", "error", "candidates", "warnings", "why", "device"];
    assert_eq!(keys(&explanation), expected);
    assert_eq!(
        (&explanation["kind"], &explanation["chosen"]),
        (&Value::from("mla_attention"), &Value::from("CPU_MLA"))
    );
    assert_eq!((&explanation["wanted"], &explanation["error"]), (&Value::Null, &Value::Null));
    let candidate = &explanation["candidates"][1];
    assert_eq!(keys(candidate), ["name", "platform", "version", "source", "rank", "valid", "reasons"]);
    assert_eq!(candidate["reasons"][0], "MLA not supported");

    let wanted = attache.json(&["explain", "--json", "--use-mla", "--backend", "cpu_attn"]);
    assert_eq!(wanted["wanted"], serde_json::json!({"name": "CPU_ATTN", "source": "flag --backend"}));
    assert_eq!(wanted["chosen"], Value::Null);
    assert!(wanted["error"].as_str().unwrap().contains("MLA not supported"));
    let per_kind =
        ["explain", "--json", "--use-mla", "--backend", "CPU_ATTN", "--backend-per-kind", "mla_attention=CPU_MLA"];
    assert_eq!(attache.json(&per_kind)["chosen"], "CPU_MLA");
}

#[test]
fn plan_reads_configurations_and_refuses_unknown_families_by_name() {
    let attache = Attache::new();
    let plan = attache.json(&["plan", "tiny-hybrid", "--json"]);
    assert_eq!(keys(&plan), ["model", "device", "layers", "kv_layout", "block_size", "warnings"]);
    assert_eq!(plan["layers"].as_array().unwrap().len(), 8);
    assert_eq!(keys(&plan["layers"][0])[..4], ["index", "kind", "backend", "request"]);
    assert_eq!(plan["block_size"], 16);
    let config = attache.path("config.json");
    let llama = r#"{"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "hidden_size": 512, "torch_dtype": "bfloat16"}"#;
    std::fs::write(&config, llama).expect("written");
    let plan = attache.json(&["plan", &config, "--json", "--block-size", "48"]);
    assert_eq!((plan["layers"][2]["backend"].as_str(), plan["block_size"].as_u64()), (Some("CPU_ATTN"), Some(48)));
    std::fs::write(&config, r#"{"model_type": "unheard_of"}"#).expect("written");
    let (code, line) = attache.error(&["plan", &config]);
    assert!(code == 1 && line.contains("unheard_of"), "{code} {line}");
    let what_if = attache.json(&["plan", "tiny-hybrid", "--what-if", "backend=CPU_MLA", "--json"]);
    assert_eq!(what_if[0]["valid"], false);
    assert!(what_if[0]["changes"].as_array().is_some_and(|changes| !changes.is_empty()), "{what_if}");
}

#[test]
fn a_catalogue_plans_for_other_machines_and_is_never_run() {
    let attache = Attache::new();
    let published = attache.path("published.toml");
    std::fs::write(&published, attache_catalogue::PUBLISHED).expect("written");
    let mla = ["explain", "--use-mla", "--head-size", "576", "--catalogue", &published, "--device"];
    let chosen =
        |device: &str, more: &[&str]| attache.json(&[&mla[..], &[device, "--json"], more].concat())["chosen"].clone();
    assert_eq!(chosen("cuda:9.0", &[]), "FLASH_ATTN_MLA");
    assert_eq!(chosen("H100", &[]), "FLASH_ATTN_MLA");
    assert_eq!(chosen("mi300x", &[]), "ROCM_AITER_MLA");
    assert_eq!(chosen("b200", &["--prefer", "CUTLASS_MLA"]), "CUTLASS_MLA");
    assert_eq!(chosen("h100", &["--state-space", "gdn"]), "GDN_ATTN");
    let list = attache.run(&["list", "--catalogue", &published, "--json"]);
    assert!(String::from_utf8_lossy(&list.stdout).contains("MAMBA1_ATTN"));
    // On this machine the catalogue's CPU backends have no kernels: what runs is ours.
    let output = attache.run(&["run", "--max-tokens", "2", "--catalogue", &published, "--prompt", "a"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for (text, expected) in [("name = 3", "line 1"), ("", "missing field"), ("name = \"x", "line 1")] {
        std::fs::write(&published, text).expect("written");
        let (code, line) = attache.error(&["list", "--catalogue", &published]);
        assert!(code == 2 && line.contains("published.toml") && line.contains(expected), "{code} {line}");
    }
    let (code, line) = attache.error(&["list", "--catalogue", "nowhere.toml"]);
    assert!(code == 2 && line.contains("nowhere.toml"), "{code} {line}");
    let (code, line) = attache.error(&["explain", "--state-space", "mamba3"]);
    assert!(code == 2 && line.contains("valid: mamba1, mamba2, short_conv, linear, gdn"), "{code} {line}");
}

#[test]
fn the_table_of_a_plan_is_this_one() {
    let output = Attache::new().run(&["plan", "tiny-hybrid"]);
    let text = String::from_utf8(output.stdout).expect("text");
    let rows: Vec<String> = text.lines().map(words).filter(|row| !row.is_empty()).collect();
    let golden = [
        "attache_tiny_hybrid on cpu:x86_64: KV layout head_major, latent, block size 16",
        "layers kind heads head size features backend source why",
        "0, 4 sliding_window 4/2 32 window 64 CPU_ATTN linked in the only valid backend",
        "1, 5 mla_attention 4 64 CPU_MLA linked in the only valid backend",
        "2, 6 full_attention 4/2 32 CPU_ATTN linked in the only valid backend",
        "3, 7 sliding_window_mla 4 64 window 64 CPU_MLA linked in the only valid backend",
    ]
    .map(|row| row.replace("x86_64", std::env::consts::ARCH));
    assert_eq!(rows, golden);
}

#[test]
fn a_broken_plugin_is_one_warning_and_the_rest_works() {
    let attache = Attache::new();
    std::fs::write(attache.path("broken.attache.toml"), "text").expect("written");
    let (directory, missing) = (attache.directory.path().display().to_string(), attache.path("missing.so"));
    for (arguments, variable, value, part) in [
        (&["explain"][..], "ATTACHE_PLUGIN_PATH", &directory, "broken.attache.toml: line 1"),
        (&["plan", "tiny-hybrid", "--json"], "ATTACHE_PLUGINS", &missing, "missing.so: cannot read the plugin"),
        (&["run", "--max-tokens", "1"], "ATTACHE_PLUGIN_PATH", &directory, "broken.attache.toml: line 1"),
    ] {
        let output = attache.command(arguments).env(variable, value).output().expect("it starts");
        let text = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.success() && text.lines().count() == 1, "{arguments:?}: {text}");
        assert!(text.starts_with("warning: /") && text.contains(part), "{arguments:?}: {text}");
    }
    // These show it themselves.
    let output = attache.run(&["list", "--all", "--plugin-path", &directory]);
    assert!(output.stderr.is_empty() && String::from_utf8(output.stdout).expect("text").contains("invalid"));
}

#[test]
fn exit_codes_and_clear_lines() {
    let attache = Attache::new();
    let text = attache.path("text.so");
    std::fs::write(&text, "just text").expect("written");
    let broken = attache.path("broken.gguf");
    std::fs::write(&broken, b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff").expect("written");
    let directory = attache.directory.path().display().to_string();
    for (arguments, code, part) in [
        (vec!["explain", "--backend", "NOPE"], 3, "valid: CPU_ATTN, CPU_MLA"),
        (vec!["explain", "--backend", "CPU_ATN"], 3, "did you mean 'CPU_ATTN'?"),
        (vec!["explain", "--use-mla", "--backend", "CPU_ATTN"], 3, "MLA not supported"),
        (vec!["explain", "--use-sparse"], 3, "sparse not supported"),
        (vec!["run", "--backend", "CPU_ATTN", "--max-tokens", "1"], 3, "MLA not supported"),
        (vec!["explain", "--head-size", "0"], 2, "head_size is 0"),
        (vec!["explain", "--head-size", "-1"], 2, ""),
        (vec!["explain", "--dtype", "f64"], 2, "valid: f32, f16, bf16"),
        (vec!["explain", "--kv-cache-dtype", "fp9"], 2, "unknown kv_cache_dtype 'fp9'"),
        (vec!["explain", "--kind", "mla"], 2, "mla_attention"),
        (vec!["explain", "--backend-per-kind", "mla=CPU_MLA"], 2, "sliding_window_mla"),
        (vec!["explain", "--device", "cuda:x.y:z"], 3, "no backend can serve"),
        (vec!["explain", "--nope"], 2, ""),
        (vec!["explain", "--config", "missing.toml"], 2, "missing.toml"),
        (vec!["explain", "--plugin", &text], 4, "text.so"),
        (vec!["explain", "--plugin", "missing.attache.toml"], 4, "missing.attache.toml"),
        (vec!["plan", "missing.json"], 1, "missing.json"),
        (vec!["plan", "missing.gguf"], 1, "missing.gguf"),
        (vec!["plan", &broken], 1, "broken.gguf"),
        (vec!["run", "--model", &directory], 1, "config.json"),
        (vec!["plan", ""], 2, "MODEL"),
        (vec!["run", "--model", ""], 2, "--model"),
        (vec!["run", "--threads", "100000"], 2, "0..=1024"),
        (vec!["run", "--cache-tokens", "0"], 2, "cache_tokens = 0"),
        (vec!["run", "--max-tokens", "99999999999999999999999"], 2, "--max-tokens"),
        (vec!["run", "--temperature=-1"], 2, "--temperature -1"),
        (vec!["run", "--temperature", "nan"], 2, "--temperature"),
        (vec!["explain", "--plugin", &directory], 4, "a directory"),
        (vec!["case", "run", &text, "--out", "out.safetensors"], 2, "text.so: not a readable safetensors file"),
        (vec!["case", "run", "missing", "--out", "out.safetensors"], 2, "missing"),
    ] {
        let (found, line) = attache.error(&arguments);
        assert!(found == code && line.contains(part), "{arguments:?}: {found} (wanted {code}): {line}");
    }
    let output = attache.run(&["explain", "--plugin", &text]);
    assert_eq!(String::from_utf8(output.stderr).expect("text").lines().count(), 1, "one line for a broken plugin");
    let output = attache.command(&["explain"]).env("ATTACHE_BACKND", "x").output().expect("it starts");
    let text = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("did you mean 'ATTACHE_BACKEND'?"), "{text}");
    let output =
        attache.command(&["explain", "--use-mla"]).env("ATTACHE_BACKEND", "CPU_ATTN").output().expect("it starts");
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8(output.stderr).expect("text").contains("environment ATTACHE_BACKEND"));
    assert_eq!(attache.run(&["--version"]).status.code(), Some(0));
}

#[test]
fn list_and_doctor_show_the_linked_in_plugins() {
    let attache = Attache::new();
    let list = attache.json(&["list", "--all", "--json"]);
    let names: Vec<&str> = list["plugins"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["cpu", "mla"], "as many as this program links");
    assert!(!list["searched"].as_array().unwrap().is_empty());
    std::fs::write(attache.path("attache.toml"), "[plugins]\ndeny = [\"mla\"]\n").expect("written");
    let doctor = attache.json(&["doctor", "--json"]);
    let denied = doctor["settings"].as_array().unwrap().iter().find(|setting| setting["key"] == "deny").unwrap();
    assert_eq!((&denied["value"], &denied["origin"]), (&Value::from("MLA"), &Value::from("file attache.toml")));
    assert_eq!(attache.run(&["explain", "--use-mla"]).status.code(), Some(3));
}

#[test]
fn a_closed_pipe_is_not_an_error_and_colours_are_off_on_demand() {
    let attache = Attache::new();
    let mut child =
        attache.command(&["matrix"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(String::from_utf8(output.stderr).expect("text").is_empty());
    // In a pipe, with NO_COLOR and without it.
    for no_color in ["1", ""] {
        let mut command = attache.command(&["explain"]);
        let output = command.env("ATTACHE_LOG", "debug").env("NO_COLOR", no_color).output().expect("it starts");
        let log = String::from_utf8(output.stderr).expect("text");
        assert!(log.contains("backend chosen") && !log.contains('\u{1b}'), "{log}");
    }
}

/// A tensor of a case's file: name, dtype, shape, bytes.
type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn floats(name: &'static str, shape: &[usize], value: f32) -> Tensor {
    (name, Dtype::F32, shape.to_vec(), value.to_le_bytes().repeat(shape.iter().product()))
}

fn integers(name: &'static str, values: &[i32]) -> Tensor {
    (name, Dtype::I32, vec![values.len()], values.iter().flat_map(|value| value.to_le_bytes()).collect())
}

/// Two requests, of 1 and 2 query tokens and 4 and 5 keys.
fn write_case(path: &str, tensors: Vec<Tensor>, metadata: &[(&str, &str)]) {
    let mut all = tensors;
    all.extend([integers("query_start_loc", &[0, 1, 3]), integers("seq_lens", &[4, 5])]);
    let views = all
        .iter()
        .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    std::fs::write(path, safetensors::serialize(views, Some(metadata)).expect("a file")).expect("written");
}

/// Zeros for q and ones for v: every output is exactly 1.
fn plain_case() -> Vec<Tensor> {
    vec![floats("q", &[3, 4, 8], 0.0), floats("k", &[9, 2, 8], 0.5), floats("v", &[9, 2, 8], 1.0)]
}

/// Shape and numbers of one tensor of an output file.
fn read_output(path: &str, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).expect("the output");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensor = tensors.tensor(name).expect(name);
    (tensor.shape().to_vec(), tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

#[test]
fn a_case_runs_from_a_file_into_a_file() {
    let attache = Attache::new();
    let (case, out) = (attache.path("case.safetensors"), attache.path("out.safetensors"));
    let settings =
        [("scale", "0.35"), ("causal", "true"), ("sliding_window", "3"), ("layout", "NHD"), ("block_size", "7")];
    write_case(&case, plain_case(), &settings);
    let report = attache.json(&["case", "run", &case, "--out", &out, "--check", "--json"]);
    assert_eq!(keys(&report), ["backend", "source", "why", "layout", "block_size", "out", "check"]);
    assert_eq!(report["backend"], "CPU_ATTN");
    assert_eq!((report["layout"].as_str(), report["block_size"].as_u64()), (Some("token_major"), Some(7)));
    let (shape, values) = read_output(&out, "out");
    assert!(shape == [3, 4, 8] && values.iter().all(|value| *value == 1.0), "{shape:?} {values:?}");
    let (shape, lse) = read_output(&out, "lse");
    assert_eq!(shape, [4, 3]);
    assert!(lse.iter().all(|lse| (lse - 3_f32.ln()).abs() < 1e-6), "three keys of logit 0: {lse:?}");

    // Absorbed: a row is [latent | rope], and the latent part holds the values.
    let mla = [("scale", "0.35"), ("kv_lora_rank", "8"), ("qk_rope_head_dim", "4"), ("mla_form", "absorbed")];
    write_case(&case, vec![floats("q", &[3, 4, 12], 0.0), floats("k", &[9, 12], 0.5)], &mla);
    let report = attache.json(&["case", "run", &case, "--out", &out, "--check", "--json"]);
    assert_eq!((report["backend"].as_str(), report["layout"].as_str()), (Some("CPU_MLA"), Some("latent")));
    let (shape, values) = read_output(&out, "out");
    assert!(shape == [3, 4, 8] && values.iter().all(|value| *value == 0.5), "{shape:?} {values:?}");
    let (_, lse) = read_output(&out, "lse");
    for (found, keys) in lse.iter().zip([4_f32, 4.0, 5.0].repeat(4)) {
        assert!((found - keys.ln()).abs() < 1e-6, "{keys} keys of logit 0: {lse:?}");
    }
}

#[test]
fn a_wrong_case_is_refused_by_name_and_never_overwritten() {
    let attache = Attache::new();
    let (case, out) = (attache.path("case.safetensors"), attache.path("out.safetensors"));
    let nowhere = attache.path("nowhere/out.safetensors");
    let infinite = [plain_case(), vec![floats("alibi_slopes", &[4], f32::INFINITY)]].concat();
    for (tensors, metadata, target, code, part) in [
        (plain_case(), ("colour", "blue"), &out, 2, "case.safetensors: unknown metadata key 'colour'"),
        (plain_case(), ("scale", "nan"), &out, 2, "case.safetensors: metadata scale"),
        (plain_case(), ("block_size", "4294967295"), &out, 2, "block_size is 4294967295"),
        (plain_case()[..2].to_vec(), ("scale", "1"), &out, 2, "the tensor 'v' is missing"),
        (infinite, ("scale", "1"), &out, 2, "alibi_slopes[0] is inf"),
        (plain_case(), ("layout", "nope"), &out, 3, "cache layout 'nope'"),
        (plain_case(), ("kv_cache_dtype", "fp8"), &out, 3, "kv_cache_dtype not supported"),
        (plain_case(), ("scale", "1"), &nowhere, 1, "nowhere"),
        (plain_case(), ("scale", "1"), &case, 2, "is the case itself"),
    ] {
        write_case(&case, tensors, &[metadata]);
        let before = std::fs::read(&case).expect("the case");
        let (found, line) = attache.error(&["case", "run", &case, "--out", target, "--check"]);
        assert!(found == code && line.contains(part), "{metadata:?}: {found} (wanted {code}): {line}");
        assert_eq!(std::fs::read(&case).expect("the case"), before);
    }
}

/// Words alone, so that rules and widths of tables do not count.
fn words(text: &str) -> String {
    text.split_whitespace().filter(|word| !word.starts_with(['─', '═'])).collect::<Vec<_>>().join(" ")
}

/// The arguments of a command as a document shows it.
fn arguments(line: &str) -> Vec<&str> {
    let parts = line.split('"').enumerate();
    parts.flat_map(|(i, part)| if i % 2 == 1 { vec![part] } else { part.split_whitespace().collect() }).collect()
}

#[test]
fn the_commands_of_the_operators_document_print_what_it_shows() {
    let attache = Attache::new();
    let llama = r#"{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "hidden_size": 512, "torch_dtype": "bfloat16"}"#;
    std::fs::write(attache.path("config.json"), llama).expect("written");
    write_case(&attache.path("case.safetensors"), plain_case(), &[("scale", "0.35")]);
    std::fs::write(attache.path("published.toml"), attache_catalogue::PUBLISHED).expect("written");
    let mut shown = 0;
    for block in include_str!("../../../docs/operators.md").split("```console\n$ attache ").skip(1) {
        let (command, rest) = block.split_once('\n').expect("a command");
        let expected = rest.split("```").next().unwrap_or_default().replace("x86_64", std::env::consts::ARCH);
        let output = attache.run(&arguments(command));
        let found = words(&(String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr)));
        let agrees = match expected.split_once('…') {
            Some((beginning, _)) => found.starts_with(&words(beginning)),
            None => found == words(&expected),
        };
        assert!(agrees, "docs/operators.md shows for `attache {command}`:\n{expected}\nand it prints:\n{found}");
        shown += 1;
    }
    let commands = ["run", "plan", "explain", "list", "matrix", "doctor", "case run"];
    assert!(shown >= commands.len(), "{shown} commands are shown");
    for command in commands {
        let shows = format!("$ attache {command}");
        assert!(include_str!("../../../docs/operators.md").contains(&shows), "docs/operators.md lacks {shows}");
    }
}

#[test]
fn documents_are_not_stale() {
    let operators = include_str!("../../../docs/operators.md");
    for variable in attache_core::config::VARIABLES {
        let row = format!("| `{}` | {} |", variable.name, variable.help);
        assert!(operators.contains(&row), "docs/operators.md lacks: {row}");
    }
    let example = operators.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    let flags = attache_core::config::Overrides::default();
    let config = attache_core::config::Config::resolve(Some((Path::new("attache.toml"), example)), [], &flags);
    assert!(config.is_ok(), "{config:?}");
    let cases = include_str!("../../../docs/cases.md");
    for name in attache_conformance::case::TENSORS.iter().chain(attache_conformance::case::METADATA_KEYS) {
        assert!(cases.contains(&format!("| `{name}` |")), "docs/cases.md lacks {name}");
    }
    let attache = Attache::new();
    let output = attache.run(&["matrix", "--format", "markdown"]);
    let matrix = String::from_utf8(output.stdout).expect("text");
    let document = include_str!("../../../docs/matrix.md");
    assert!(document.ends_with(&matrix), "docs/matrix.md is stale; it should end with:\n{matrix}");
}
