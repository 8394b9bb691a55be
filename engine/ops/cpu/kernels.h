// What every kernel is given: its own arguments, the step, and its place in a team of threads.
//
// A tape (tape.cpp) is a list of kernels with their arguments, made once; a step runs it from first to last. All
// threads of the team enter each kernel and divide its work by `Team::take`; between two kernels they meet.
#pragma once

#include <atomic>
#include <cstdint>

// One layer group's rows of the step: how the cache lies, from library.py's `GroupRows`.
struct GroupRows {
    int64_t rows;
    const int64_t* starts;    // [rows] tokens in the cache before this step
    const int64_t* counts;    // [rows] tokens of this step
    const int64_t* offsets;   // [rows] where they begin in the packed order
    const int32_t* tables;    // [lines, width] block of each page of a context; 0 behind a window
    const int64_t* table_of;  // [rows] each row's line
    int64_t width;
    const int64_t* slots;     // [tokens] block * page + place within it that a token's K and V go to
    int64_t window;           // tokens that a query sees, itself included; 0: all
    void *keys, *values;      // of a cache that is used instead of every layer's own; null: theirs
};

// One forward pass, from library.py's `Step`.
struct Step {
    int64_t tokens;            // packed tokens
    int64_t kept;              // tokens whose logits are wanted
    const int64_t* ids;        // [tokens]
    const int64_t* positions;  // [tokens], each in its own request
    const int64_t* keep;       // [kept] places in the packed order
    const GroupRows* groups;   // of each layer group
};

class Team {
public:
    const int thread, threads;

    Team(int thread, int threads, std::atomic<int64_t>* counter) : thread(thread), threads(threads), next(counter) {}

    // The first of `count` pieces of work that nobody has taken yet, within one kernel. Pieces are numbered from 0.
    int64_t take(int64_t count = 1) { return next->fetch_add(count, std::memory_order_relaxed); }

private:
    std::atomic<int64_t>* next;
};

typedef void (*Kernel)(const void* arguments, const Step& step, Team& team);
