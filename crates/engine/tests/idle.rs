//! Alone in its process, so that no other test's threads are counted: an idle pool uses no CPU time.

use attache_engine::pool::Pool;
use std::time::Duration;

/// CPU time of this process's pool threads, in ticks of 1/100 s.
fn worker_ticks() -> u64 {
    let mut ticks = 0;
    for entry in std::fs::read_dir("/proc/self/task").expect("procfs").flatten() {
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if !stat.contains("(attache-") {
            continue;
        }
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        ticks += fields.get(11..13).map_or(0, |times| times.iter().filter_map(|t| t.parse::<u64>().ok()).sum());
    }
    ticks
}

#[test]
fn an_idle_pool_sleeps() {
    let pool = Pool::new(4);
    for _ in 0..100 {
        pool.run(64, &|_, _| {
            std::hint::black_box((0..1000).sum::<usize>());
        });
    }
    std::thread::sleep(Duration::from_millis(50));
    let before = worker_ticks();
    std::thread::sleep(Duration::from_millis(500));
    let used = worker_ticks() - before;
    // Three spinning workers would use up to 150.
    assert!(used <= 2, "idle workers used {used} ticks of 10 ms");
}
