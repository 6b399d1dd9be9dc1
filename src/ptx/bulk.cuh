// Copies of one thread through shared memory, by the GPU's own copy unit: bulk asynchronous copies, of PTX 8.0 on sm_90.
//
// A stage is a chunk of the block's dynamic shared memory with a barrier that says when a chunk has arrived in it. The thread
// asks for as many chunks as there are stages, stores each one when it has arrived, and asks for the next into a stage whose
// chunk has been read again. How many stages there are is up to whoever launches the block.
//
// Bulk copies go by another path to memory than loads and stores (the "async proxy"). Where they follow those, a fence of
// their own stands in between; where they come first, waiting for their end is one (PTX ISA, "Async proxy").

#ifndef GDRCOPY_BULK_CUH
#define GDRCOPY_BULK_CUH

// Needs device.cuh.

struct Bulk {
    enum : u32 {
        // One turn of the loop takes the thread 0.2 us, in which the link of an H200 brings 10 KiB.
        CHUNK = 16384,
        MOST_STAGES = 14,  // more than an SM of any GPU has room for
        // Stores that may still be reading their stages when another one is filled again. Without any, each load would wait for
        // the store before it.
        LAG = 2,
    };

    // By thread 0, before the others go on.
    static __device__ __forceinline__ void begin();

    // Whether there are stages enough.
    static __device__ __forceinline__ bool is_there();

    // By thread 0, `bytes` bytes: a multiple of 16, as are both addresses. They have been stored when it returns: all that is
    // ordered after this thread sees them.
    static __device__ __forceinline__ void copy(u64 source, u64 target, u32 bytes);
};

extern __shared__ __align__(128) u8 bulk_stages[];
__shared__ __align__(8) u64 bulk_arrived[Bulk::MOST_STAGES];
// The stage that is next, and the parity of its barrier's phase: these go on from request to request.
__shared__ u32 bulk_next, bulk_parity;

__device__ __forceinline__ u32 shared_address(const volatile void *at)
{
    return (u32)__cvta_generic_to_shared((const void *)at);
}

__device__ __forceinline__ u32 dynamic_shared_bytes()
{
    u32 bytes;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// Between loads and stores that this thread has done or seen, and bulk copies that follow.
__device__ __forceinline__ void fence_before_bulk()
{
    asm volatile("fence.proxy.async.global;" : : : "memory");
}

// One arrival, this thread's, and as many bytes as it says complete a phase.
__device__ __forceinline__ void init_arrived(u32 barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity)
{
    u32 is_over;
    do
        asm volatile("{\n\t"
                     ".reg .pred over;\n\t"
                     "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, over;\n\t"
                     "}"
                     : "=r"(is_over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    while (is_over == 0);
}

__device__ __forceinline__ void bulk_load(u32 stage, u64 source, u32 bytes, u32 barrier)
{
    // A block launched without a cluster is a cluster of its own.
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :
                 : "r"(stage), "l"(source), "r"(bytes), "r"(barrier)
                 : "memory");
}

// A group of its own.
__device__ __forceinline__ void bulk_store(u64 target, u32 stage, u32 bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :
                 : "l"(target), "r"(stage), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// All stores but the last LAG have read their stages.
__device__ __forceinline__ void wait_until_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"((u32)Bulk::LAG) : "memory");
}

// All stores are done, and seen by this thread.
__device__ __forceinline__ void wait_until_stored()
{
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

__device__ __forceinline__ u32 stage_count()
{
    u32 stages = dynamic_shared_bytes() / Bulk::CHUNK;
    return stages < Bulk::MOST_STAGES ? stages : Bulk::MOST_STAGES;
}

__device__ __forceinline__ void Bulk::begin()
{
    for (u32 stage = 0; stage < MOST_STAGES; stage++)
        init_arrived(shared_address(&bulk_arrived[stage]));
    bulk_next = 0;
    bulk_parity = 0;
    // The copy unit signals these barriers.
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
    asm volatile("fence.proxy.async;" : : : "memory");
}

__device__ __forceinline__ bool Bulk::is_there()
{
    return stage_count() > LAG;
}

__device__ __forceinline__ void Bulk::copy(u64 source, u64 target, u32 bytes)
{
    u32 stages = stage_count();
    u32 stage = bulk_next, parity = bulk_parity;
    u32 stage_at = shared_address(bulk_stages), barrier_at = shared_address(bulk_arrived);
    u32 filled = stage, asked = 0;
    auto fill = [&] {
        u32 length = bytes - asked < CHUNK ? bytes - asked : CHUNK;
        expect(barrier_at + 8 * filled, length);
        bulk_load(stage_at + CHUNK * filled, source + asked, length, barrier_at + 8 * filled);
        asked += length;
        filled = filled + 1 == stages ? 0 : filled + 1;
    };

    // What the CPU wrote before it rang, and what earlier requests stored.
    fence_before_bulk();
    for (u32 n = 0; n < stages && asked < bytes; n++)
        fill();
    u32 stored = 0;
    for (u32 n = 0; stored < bytes; n++) {
        u32 length = bytes - stored < CHUNK ? bytes - stored : CHUNK;
        wait_for(barrier_at + 8 * stage, parity);
        bulk_store(target + stored, stage_at + CHUNK * stage, length);
        stored += length;
        stage++;
        if (stage == stages) {
            stage = 0;
            parity ^= 1;
        }
        // The stage to be filled is that of LAG stores ago.
        if (n >= LAG && asked < bytes) {
            wait_until_read();
            fill();
        }
    }
    bulk_next = stage;
    bulk_parity = parity;
    wait_until_stored();
}

#endif
