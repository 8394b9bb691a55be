// Runs a tape: kernel after kernel, by one team of threads that stays together from the first to the last.
//
// Threads meet between kernels at a barrier of our own: it spins, since kernels take microseconds, and gives the core
// away when somebody else seems to have it. Work is handed out piece by piece, so a thread that was held up does less.

#include "kernels.h"

#include <omp.h>
#include <sched.h>

namespace {

struct Op {
    Kernel kernel;
    const void* arguments;
};

constexpr int SPINS = 4000;  // about 50 us

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

class Barrier {
public:
    // The last of `threads` to arrive runs `last` before any goes on.
    template <typename Last>
    void meet(int threads, Last last) {
        const int64_t round = rounds.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed);
            last();
            rounds.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; rounds.load(std::memory_order_acquire) == round; spins++)
            if (spins < SPINS) pause();
            else sched_yield();
    }

private:
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int64_t> rounds{0};
};

}  // namespace

extern "C" void run_tape(const Op* ops, int64_t count, const Step* step, int32_t threads) {
    Barrier barrier;
    alignas(64) std::atomic<int64_t> counter{0};
#pragma omp parallel num_threads(threads)
    {
        const int team_size = omp_get_num_threads();
        Team team(omp_get_thread_num(), team_size, &counter);
        for (int64_t i = 0; i < count; i++) {
            ops[i].kernel(ops[i].arguments, *step, team);
            barrier.meet(team_size, [&] { counter.store(0, std::memory_order_relaxed); });
        }
    }
}
