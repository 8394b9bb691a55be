// The units of work that attention divides a step into. attention.cpp walks them; kernels.h has the rows.
#pragma once

#include "kernels.h"

#include <algorithm>

struct Unit { int64_t row, kv_head, first, count; };  // queries [first, first + count) of a row

// Units by number, the longest first: those of chunks, their last queries first; then one-token rows, KV head by KV
// head, so that a prefix that rows share stays in the core's cache.
class Units {
public:
    Units(const GroupRows& rows, int64_t kv_heads, int64_t queries)  // queries: of a unit, at most
        : rows(rows), kv_heads(kv_heads), queries(queries) {}

    // Numbers must not fall from call to call. False: there are not so many units.
    bool find(int64_t number, Unit& unit) {
        for (; phase <= kv_heads && rows.rows; advance()) {
            const int64_t count = rows.counts[row], blocks = (count + queries - 1) / queries;
            const int64_t units = phase == 0 ? (count > 1 ? blocks * kv_heads : 0) : count == 1;
            if (number < before + units) {
                const int64_t piece = number - before, first = (blocks - 1 - piece % blocks) * queries;
                unit = {row, phase ? phase - 1 : piece / blocks, first, std::min(queries, count - first)};
                return true;
            }
            before += units;
        }
        return false;
    }

private:
    const GroupRows& rows;
    const int64_t kv_heads, queries;
    int64_t phase = 0, row = 0, before = 0;  // phase 0: chunks, then one a KV head; units before this row

    void advance() {
        if (++row == rows.rows) row = 0, phase++;
    }
};
