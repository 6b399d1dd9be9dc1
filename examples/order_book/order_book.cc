// Orders to a book that lives in a running kernel, and its answers, timed and checked: main.rs beside this, in C++.
//
//     nvcc -std=c++17 -O2 -arch=native -x cu order_book.cc -lgdrapi -o order_book && ./order_book
//
// or `sh nvcc.sh LIB INCLUDE`, which finds library and headers where they are. The kernel is order_book.cu. A C++ compiler
// alone builds it too: `g++ -std=c++17 -pthread order_book.cc -lgdrapi`, for GDRCOPY_BACKEND=emulated, where a thread plays
// the kernel, and the times say nothing about a GPU.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <gdrapi.h>
#include <gdrapi_ext.h>
#include <gdrcopy_channel.cuh>

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include "order_book.cu"
#else
#include <thread>
#endif

namespace {

// Side (0 buys, 1 sells), price (0 to 63), quantity, unused.
using Order = std::array<std::uint32_t, 4>;
// Quantity filled, quantity that rests, best bid plus 1, best ask plus 1; 0 where there is none.
using Answer = std::array<std::uint32_t, 4>;

constexpr unsigned ORDERS = 2000;
constexpr std::uint64_t TIMEOUT_US = 2000000;

void must(int result)
{
    if (result != 0)
        throw std::runtime_error(gdrx_last_error());
}

// The same book on the CPU, against which the kernel's answers are checked.
class Book {
public:
    Answer take(const Order &order)
    {
        const unsigned side = order[0] & 1, price = order[1] % 64;
        std::uint32_t left = order[2], filled = 0;
        while (left != 0) {
            const unsigned offer = best(1 - side);
            if (offer == 0 || (side == 0 ? offer - 1 > price : offer - 1 < price))
                break;
            std::uint32_t &there = levels_[1 - side][offer - 1];
            const std::uint32_t traded = std::min(there, left);
            there -= traded;
            left -= traded;
            filled += traded;
        }
        levels_[side][price] += left;
        return { filled, left, best(0), best(1) };
    }

private:
    // The highest bid or the lowest ask, plus 1; 0 if there is none.
    std::uint32_t best(unsigned side) const
    {
        for (unsigned n = 0; n < 64; n++) {
            const unsigned price = side == 0 ? 63 - n : n;
            if (levels_[side][price] != 0)
                return price + 1;
        }
        return 0;
    }

    std::array<std::array<std::uint32_t, 64>, 2> levels_{};
};

// Orders around a price that wanders, both sides alike.
class Orders {
public:
    Order next() { return { random(2), 24 + random(16), 1 + random(100), 0 }; }

private:
    std::uint32_t random(std::uint32_t below)
    {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 17;
        state_ ^= state_ << 5;
        return state_ % below;
    }

    std::uint32_t state_ = 0x9e3779b9;
};

// A session and its mailbox, which go in the right order: destroying the mailbox ends the kernel and waits for it.
class Mailbox {
public:
    Mailbox() : g_(gdr_open())
    {
        if (!g_)
            throw std::runtime_error(gdrx_last_error());
        gdrx_channel_options_t options = {};
        options.size = sizeof options;
        options.kernel_limit_ms = 60000;
        if (gdrx_mailbox_create(g_, &options, sizeof(Order), sizeof(Answer), &mailbox_) != 0) {
            const std::string why = gdrx_last_error();
            gdr_close(g_);
            throw std::runtime_error(why);
        }
    }
    ~Mailbox() { gdr_close(g_); }
    Mailbox(const Mailbox &) = delete;
    Mailbox &operator=(const Mailbox &) = delete;

    std::string backend() const { return gdrx_backend(g_); }

    // What the kernel takes.
    gdrc_channel device() const
    {
        gdrc_channel device;
        must(gdrx_mailbox_device(mailbox_, &device, sizeof device));
        return device;
    }

    Answer call(const Order &order)
    {
        Answer answer;
        must(gdrx_mailbox_call(mailbox_, order.data(), answer.data(), TIMEOUT_US));
        return answer;
    }

    void stop() { must(gdrx_mailbox_stop(mailbox_)); }

private:
    gdr_t g_;
    gdrx_mailbox_t mailbox_{};
};

void trade(Mailbox &mailbox)
{
    Book book;
    Orders orders;
    std::vector<double> times;
    times.reserve(ORDERS);
    unsigned long long traded = 0;
    for (unsigned n = 0; n < ORDERS; n++) {
        const Order order = orders.next();
        const auto started = std::chrono::steady_clock::now();
        const Answer answer = mailbox.call(order);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - started).count());
        if (answer != book.take(order))
            throw std::runtime_error("order " + std::to_string(n) + ": the kernel's answer is not the book's");
        traded += answer[0];
    }
    std::sort(times.begin(), times.end());
    const auto at = [&](unsigned share) { return times[(ORDERS - 1) * share / 1000]; };
    std::printf("%u orders, %llu pieces traded, every answer checked\n", ORDERS, traded);
    std::printf("order to answer: median %.2f us, 99 %% %.2f us, 99.9 %% %.2f us\n", at(500), at(990), at(999));
}

#ifdef __CUDACC__

void cuda(cudaError_t result, const char *what)
{
    if (result != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

void run(Mailbox &mailbox)
{
    if (mailbox.backend() == "emulated")
        throw std::runtime_error("backend 'emulated' runs no kernel: build with a C++ compiler, or use a GPU");
    cudaStream_t stream;
    int least = 0, greatest = 0;
    cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities");
    cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "stream");
    order_book<<<1, 32, 0, stream>>>(mailbox.device());
    cuda(cudaGetLastError(), "launch");
    // From here to the end of the kernel no call of CUDA's.
    std::string failure;
    try {
        trade(mailbox);
    } catch (const std::exception &error) {
        failure = error.what();
    }
    mailbox.stop();
    cuda(cudaStreamSynchronize(stream), "the kernel");
    cuda(cudaStreamDestroy(stream), "stream");
    if (!failure.empty())
        throw std::runtime_error(failure);
}

#else

// What order_book.cu does, with a warp of one lane.
void play_kernel(const gdrc_channel &channel)
{
    Book book;
    Order order;
    gdrc_u32 words[GDRC_LINE_WORDS];
    gdrc_port port;
    gdrc_open(&port, &channel, 0);
    while (gdrc_recv_lines(&port, 1, words)) {
        std::memcpy(order.data(), words, sizeof order);
        const Answer answer = book.take(order);
        std::memset(words, 0, sizeof words);
        std::memcpy(words, answer.data(), sizeof answer);
        if (!gdrc_send_lines(&port, 1, words))
            break;
    }
    gdrc_close(&port);
}

void run(Mailbox &mailbox)
{
    if (mailbox.backend() != "emulated")
        throw std::runtime_error("kernels are launched by the build with nvcc; or set GDRCOPY_BACKEND=emulated");
    std::printf("emulated: a thread plays the kernel\n");
    std::thread kernel(play_kernel, mailbox.device());
    std::string failure;
    try {
        trade(mailbox);
    } catch (const std::exception &error) {
        failure = error.what();
    }
    mailbox.stop();
    kernel.join();
    if (!failure.empty())
        throw std::runtime_error(failure);
}

#endif

} // namespace

int main()
try {
    Mailbox mailbox;
    run(mailbox);
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
