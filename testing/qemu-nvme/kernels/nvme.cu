// Drives a pair of NVMe queues from a GPU: writes PRP lists, SGLs and commands, rings the doorbell, and takes completions. Queues, lists
// and doorbells lie in memory that the controller reaches too. One warp has a pair, so that nothing is locked.
//
// Rebuilt and checked by build.sh of crates/cuda/kernels; the PTX beside this file is what the tests load.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 LANES = 32;
constexpr u64 PAGE_BYTES = 4096;
constexpr u64 ENTRY_WORDS = 8;

// As the GPU reaches everything.
struct Queue {
    u64 *submissions;
    const u32 *completions;
    u32 *tail_doorbell;
    u32 *head_doorbell;
    u32 entries;
    u32 tail;
    u32 head;
    // What the phase bit of a new completion is.
    u32 phase;
    // Completions that were taken so far.
    u64 taken;
};

// A read or a write whose pages lie one after another, the first one last.
struct Transfer {
    u64 first_block;
    // As the controller reaches them: the pages, and room for a list.
    u64 data;
    u64 list;
    // The same room, as the GPU reaches it.
    u64 *list_here;
    u32 pages;
    u32 blocks;
    u32 command_id;
    // The opcode in the low byte, and 1 above it for an SGL.
    u32 kind;
};

__device__ u64 page(const Transfer &transfer, u32 number) {
    return transfer.data + (transfer.pages - 1 - number) * PAGE_BYTES;
}

// The two words of PRP 1 and PRP 2.
__device__ ulonglong2 prps(const Transfer &transfer) {
    if (transfer.pages <= 2) return make_ulonglong2(page(transfer, 0), transfer.pages == 2 ? page(transfer, 1) : 0);
    for (u32 at = 1; at < transfer.pages; at++) transfer.list_here[at - 1] = page(transfer, at);
    return make_ulonglong2(page(transfer, 0), transfer.list);
}

// A descriptor: of data, or of the last segment.
__device__ ulonglong2 descriptor(u64 address, u32 bytes, u64 type) {
    return make_ulonglong2(address, bytes | type << 60);
}

__device__ ulonglong2 sgl(const Transfer &transfer) {
    if (transfer.pages == 1) return descriptor(page(transfer, 0), PAGE_BYTES, 0);
    for (u32 at = 0; at < transfer.pages; at++)
        ((ulonglong2 *)transfer.list_here)[at] = descriptor(page(transfer, at), PAGE_BYTES, 0);
    return descriptor(transfer.list, 16 * transfer.pages, 3);
}

// The caller has seen that there is room for all of them. One block of one warp.
extern "C" __global__ void forebay_nvme_submit(Queue *queue, const Transfer *transfers, u32 count) {
    for (u32 at = threadIdx.x; at < count; at += LANES) {
        const Transfer transfer = transfers[at];
        const bool has_sgl = transfer.kind >> 8;
        const ulonglong2 pointer = has_sgl ? sgl(transfer) : prps(transfer);
        u64 *entry = queue->submissions + (queue->tail + at) % queue->entries * ENTRY_WORDS;
        entry[0] = (transfer.kind & 0xff) | (has_sgl ? 1u << 14 : 0) | transfer.command_id << 16 | 1ull << 32;
        entry[1] = entry[2] = entry[7] = 0;
        entry[3] = pointer.x;
        entry[4] = pointer.y;
        entry[5] = transfer.first_block;
        entry[6] = transfer.blocks - 1;
    }
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x > 0) return;
    queue->tail = (queue->tail + count) % queue->entries;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(queue->tail_doorbell), "r"(queue->tail) : "memory");
}

// Takes `count` completions, or those that come within a time. To the word of a command's number 1 << 16 is added, and its status set.
// One thread.
extern "C" __global__ void forebay_nvme_take(Queue *queue, u32 count, u64 within_ns, u32 *outcomes) {
    u64 begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    u32 head = queue->head, phase = queue->phase, taken = 0;
    while (taken < count) {
        u32 last;
        // It holds the phase bit: the rest of the entry is there when that has changed.
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(last) : "l"(queue->completions + 4 * head + 3) : "memory");
        if ((last >> 16 & 1) != phase) {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
            if (now - begun > within_ns) break;
            continue;
        }
        u32 &outcome = outcomes[last & 0xffff];
        outcome = (outcome & 0xffff0000) + 0x10000 | last >> 17;
        taken++;
        if (++head == queue->entries) {
            head = 0;
            phase ^= 1;
        }
    }
    queue->head = head;
    queue->phase = phase;
    queue->taken += taken;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(queue->head_doorbell), "r"(head) : "memory");
}
