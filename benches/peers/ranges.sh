#!/usr/bin/env bash
# Prints the two tables of docs/benchmarks/README.md that put all runs of the comparison together: a line for each run,
# and a line for each workload that is more than 0.04 behind the best of the others in one of them, both by medians and
# by the least of the rounds.
#
#   benches/peers/ranges.sh              all that docs/benchmarks has, but for the groups shapes and crowds
#   benches/peers/ranges.sh FILE...      only these
set -euo pipefail
cd "$(dirname "$0")/../../docs/benchmarks"
[ "$#" != 0 ] || set -- peers.csv peers-{quiet,neighbours}.csv peers-genoa{,-december,-read,-again}.csv \
    peers-{busy-host,busy,evening}.csv \
    peers-zen3{,-busy,-evening,-december}.csv peers-emerald.csv peers-intel.csv peers-16.csv other-runs.csv
awk -F , '
# The columns by their names: not every file has all of them.
FNR == 1 { delete column; for (i = 1; i <= NF; i++) column[$i] = i; files[++count] = FILENAME; next }
function field(name) { return name in column ? $column[name] : "" }
# A row of a run of which no file is kept.
"ours/best by medians" in column { others[++many_others] = $column["workload"] SUBSEP $4 SUBSEP $5; next }
{
    workload = $2; key = FILENAME SUBSEP workload
    if (!(key in seen)) { seen[key] = 1; rows[FILENAME, ++number[FILENAME]] = workload }
    allocator = $3
    figure("medians", field("cpu ns/op")); figure("least", field("least cpu ns/op")); figure("peak", field("peak MB"))
}
function figure(kind, value) {
    if (value == "") return
    if (allocator == "pageheap") { ours[kind, key] = value; return }
    if (kind == "peak") { peaks[allocator, key] = value; return }
    if ((kind, key) in best && value + 0 >= best[kind, key] + 0) return
    best[kind, key] = value
    ahead[kind, key] = allocator
}
function ratio(kind, key) { return (kind, key) in ours && (kind, key) in best ? ours[kind, key] / best[kind, key] : "" }
function is_behind(medians, least) { return medians != "" && least != "" && medians > 1.04 && least > 1.04 }
function add(workload, medians, least, who) {
    if (!(workload in known)) { known[workload] = 1; order[++workloads] = workload }
    widen("medians", workload, medians); widen("least", workload, least)
    runs[workload] += medians != ""
    if (!is_behind(medians, least)) return
    behind[workload]++
    if (index(names[workload], who) == 0) names[workload] = names[workload] (names[workload] == "" ? "" : ", ") who
}
function add_other(words,   part) {
    split(words, part, SUBSEP)
    widen("medians", part[1], part[2]); widen("least", part[1], part[3])
    more[part[1]] += is_behind(part[2] + 0, part[3] + 0)
}
function widen(kind, workload, value) {
    if (value == "") return
    if (!((kind, workload) in low) || value + 0 < low[kind, workload]) low[kind, workload] = value + 0
    if (!((kind, workload) in high) || value + 0 > high[kind, workload]) high[kind, workload] = value + 0
}
function mean(sum, many) { return many ? sprintf("%.2f", exp(sum / many)) : "" }
function range(kind, workload) { return sprintf("%.2f to %.2f", low[kind, workload], high[kind, workload]) }
# Geometric means, and how many rows are at or below 1, before anything is rounded.
function summary(file,   i, j, key, value, sum, many, level) {
    for (i = 1; i <= number[file]; i++) {
        key = file SUBSEP rows[file, i]
        for (j = 1; j <= 2; j++) {
            value = ratio(j == 1 ? "medians" : "least", key)
            if (value == "") continue
            sum[j] += log(value); many[j]++; level[j] += value <= 1
        }
        for (j = 3; j <= 4; j++) {
            value = peaks[j == 3 ? "rusty_alloc" : "jemalloc", key]
            if (value == "" || !(("peak", key) in ours)) continue
            sum[j] += log(ours["peak", key] / value); many[j]++
        }
        add(rows[file, i], ratio("medians", key), ratio("least", key), ahead["medians", key])
    }
    printf "| %s | %d | %s | %s | %s, %s | %s, %s |\n",
        file, number[file], mean(sum[1], many[1]), mean(sum[2], many[2]), many[1] ? level[1] : "-", level[2], mean(sum[3], many[3]), mean(sum[4], many[4])
}
END {
    print "| run | rows | mean, medians | least | rows at or below 1.0 | peak, of rusty_alloc and jemalloc |"
    print "|---|--:|--:|--:|--:|--:|"
    for (f = 1; f <= count; f++) if (number[files[f]]) summary(files[f])
    for (o = 1; o <= many_others; o++) add_other(others[o])
    print "\n| workload | medians | least | behind | best there |"
    print "|---|--:|--:|--:|---|"
    for (w = 1; w <= workloads; w++) {
        workload = order[w]
        if (!behind[workload] && !more[workload]) continue
        printf "| %s | %s | %s | %d of %d%s | %s |\n", workload, range("medians", workload), range("least", workload),
            behind[workload], runs[workload], more[workload] ? ", +" more[workload] : "", names[workload]
    }
    printf "\nBehind by one of the two alone, and never by both:"
    for (w = 1; w <= workloads; w++) {
        workload = order[w]
        if (behind[workload] || more[workload]) continue
        if (high["medians", workload] <= 1.04 && high["least", workload] <= 1.04) continue
        printf " %s (%s; %s)", workload, range("medians", workload), range("least", workload)
    }
    print ""
}' "$@"
