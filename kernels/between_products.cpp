// What lies between the matrix products of a decode step on a CPU, each in one pass.
//
// A product streams its weights through the caches, so that whatever runs next starts cold: its data, and its code. torch's
// operations are general and large, some thirty of them a layer; here four loops do the same.
//
// Arrays are float32 or bfloat16; sums are float32. Definitions: kernels/reference.py.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// torch's threads, by the names under which GCC asks for them: no compiler's own library of threads is needed, and there are no
// two pools that keep each other from the cores.
extern "C" {
void GOMP_parallel(void (*work)(void*), void* task, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace {

// Numbers from which on threads share a loop; fewer are done before a second one has begun.
constexpr int64_t SHARED_FROM = 1 << 16;

// body(begin, end) for parts of 0 to count, a part a thread.
template <class Body>
void share(int64_t count, int64_t threads, const Body& body) {
    if (threads == 1) return body(0, count);
    struct Task {
        int64_t count;
        const Body& body;
    } task{count, body};
    const auto work = [](void* given) {
        const Task& task = *static_cast<Task*>(given);
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        task.body(task.count * thread / threads, task.count * (thread + 1) / threads);
    };
    GOMP_parallel(work, &task, threads, 0);
}

struct bfloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void put(float& target, float x) { target = x; }

inline void put(bfloat16& target, float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    target.bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
}

// e^x = 2^n 2^f with |f| <= 1/2, 2^f by its Taylor series; NaN passes. A loop over it is compiled to vectors.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float power = x * 1.44269504f, whole = __builtin_rintf(power), f = (power - whole) * 0.69314718f;
    const float series = 1 + f * (1 + f * (1 / 2.0f + f * (1 / 6.0f + f * (1 / 24.0f + f * (1 / 120.0f + f / 720.0f)))));
    const uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return series * scale;
}

template <class Added>
void add_rms_norm(int64_t T, int64_t H, int64_t threads, const Added* x, float* residual, const float* weight, float eps,
                  float* normed) {
    share(T, T * H > SHARED_FROM ? threads : 1, [=](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const Added* added = x + t * H;
            float *sum = residual + t * H, *out = normed + t * H, squares = 0;
            for (int64_t i = 0; i < H; i++) {
                sum[i] += wide(added[i]);
                squares += sum[i] * sum[i];
            }
            const float scale = 1 / std::sqrt(squares / H + eps);
            for (int64_t i = 0; i < H; i++) out[i] = sum[i] * scale * weight[i];
        }
    });
}

template <class E>
void silu_mul(int64_t T, int64_t I, int64_t threads, const E* gate_up, E* product) {
    share(T, T * I > SHARED_FROM ? threads : 1, [=](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            for (int64_t i = 0; i < I; i++) {
                const float gate = wide(gate_up[2 * t * I + i]), up = wide(gate_up[(2 * t + 1) * I + i]);
                put(product[t * I + i], gate / (1 + exponential(-gate)) * up);
            }
    });
}

// heads [T, heads, D]: Hq of queries, then Hkv of keys and Hkv of values. Turns queries into `query`, keys into the cache.
template <class E>
void turn(const E* head, E* target, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = wide(head[i]), b = wide(head[i + half]);
        put(target[i], a * cos[i] - b * sin[i]);
        put(target[i + half], b * cos[i] + a * sin[i]);
    }
}

template <class E>
void attend(int64_t L, int64_t G, int64_t D, int64_t B, int64_t first, float scale, const E* query, const E* keys,
            const E* values, int64_t block_stride, int64_t place_stride, const int64_t* table, E* output) {
    const int64_t n = L - first;  // at least 1: a token sees itself
    std::vector<float> scratch(G * (n + 2 * D));
    float *scores = scratch.data(), *rows = scores + G * n, *sums = rows + G * D;
    for (int64_t i = 0; i < G * D; i++) rows[i] = wide(query[i]) * scale;
    for (int64_t j = 0; j < n; j++) {
        const E* key = keys + table[(first + j) / B] * block_stride + (first + j) % B * place_stride;
        for (int64_t g = 0; g < G; g++) {
            float score = 0;
            for (int64_t i = 0; i < D; i++) score += rows[g * D + i] * wide(key[i]);
            scores[g * n + j] = score;
        }
    }
    for (int64_t g = 0; g < G; g++) {
        float *row = scores + g * n, most = row[0], total = 0;
        for (int64_t j = 1; j < n; j++) most = row[j] > most ? row[j] : most;
        for (int64_t j = 0; j < n; j++) total += row[j] = exponential(row[j] - most);
        for (int64_t j = 0; j < n; j++) row[j] /= total;
    }
    for (int64_t j = 0; j < n; j++) {
        const E* value = values + table[(first + j) / B] * block_stride + (first + j) % B * place_stride;
        for (int64_t g = 0; g < G; g++) {
            const float share = scores[g * n + j];
            for (int64_t i = 0; i < D; i++) sums[g * D + i] += share * wide(value[i]);
        }
    }
    for (int64_t i = 0; i < G * D; i++) put(output[i], sums[i]);
}

// R tokens, each a row of query and output [T, Hkv * G, D]: number rows[r], of the sequence whose blocks are the line
// sequences[r] of table, of which it sees the first contexts[r] tokens. Caches [blocks, B, Hkv, D].
template <class E>
void attend_rows(int64_t R, int64_t Hkv, int64_t G, int64_t D, int64_t B, int64_t window, float scale, int64_t threads,
                 const E* query, int64_t query_stride, const E* keys, const E* values, int64_t block_stride,
                 int64_t place_stride, const int64_t* table, int64_t table_stride, const int64_t* rows,
                 const int64_t* sequences, const int64_t* contexts, E* output) {
    int64_t most = 0;
    for (int64_t r = 0; r < R; r++) most = contexts[r] > most ? contexts[r] : most;
    share(R * Hkv, R * Hkv * most > 512 ? threads : 1, [=](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t r = task / Hkv, h = task % Hkv, L = contexts[r];
            attend(L, G, D, B, window && L > window ? L - window : 0, scale, query + rows[r] * query_stride + h * G * D,
                   keys + h * D, values + h * D, block_stride, place_stride, table + sequences[r] * table_stride,
                   output + (rows[r] * Hkv + h) * G * D);
        }
    });
}

template <class E>
void turn_and_write(int64_t T, int64_t Hq, int64_t Hkv, int64_t D, int64_t B, int64_t threads, const E* heads,
                    const float* cos, const float* signed_sin, E* query, E* keys, E* values, int64_t block_stride,
                    int64_t place_stride, const int64_t* slots) {
    share(T, T * Hq * D > SHARED_FROM ? threads : 1, [=](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const E* head = heads + t * (Hq + 2 * Hkv) * D;
            const float *cosines = cos + t * D / 2, *sines = signed_sin + t * D + D / 2;
            if (slots[t] < 0) continue;  // a padded row
            const int64_t start = slots[t] / B * block_stride + slots[t] % B * place_stride;
            for (int64_t h = 0; h < Hq; h++) turn(head + h * D, query + (t * Hq + h) * D, cosines, sines, D / 2);
            for (int64_t h = 0; h < Hkv; h++) turn(head + (Hq + h) * D, keys + start + h * D, cosines, sines, D / 2);
            std::memcpy(values + start, head + (Hq + Hkv) * D, Hkv * D * sizeof(E));
        }
    });
}

}  // namespace

extern "C" {
#define SERVE(E, SUFFIX)                                                                                                    \
    void add_rms_norm_##SUFFIX(int64_t T, int64_t H, int64_t threads, const E* x, float* residual, const float* weight,    \
                               float eps, float* normed) {                                                                  \
        add_rms_norm(T, H, threads, x, residual, weight, eps, normed);                                                      \
    }                                                                                                                       \
    void silu_mul_##SUFFIX(int64_t T, int64_t I, int64_t threads, const E* gate_up, E* product) {                          \
        silu_mul(T, I, threads, gate_up, product);                                                                          \
    }                                                                                                                       \
    void turn_and_write_##SUFFIX(int64_t T, int64_t Hq, int64_t Hkv, int64_t D, int64_t B, int64_t threads,                \
                                 const E* heads, const float* cos, const float* signed_sin, E* query, E* keys, E* values,  \
                                 int64_t block_stride, int64_t place_stride, const int64_t* slots) {                       \
        turn_and_write(T, Hq, Hkv, D, B, threads, heads, cos, signed_sin, query, keys, values, block_stride, place_stride, \
                       slots);                                                                                              \
    }                                                                                                                       \
    void attend_rows_##SUFFIX(int64_t R, int64_t Hkv, int64_t G, int64_t D, int64_t B, int64_t window, float scale,         \
                              int64_t threads, const E* query, int64_t query_stride, const E* keys, const E* values,        \
                              int64_t block_stride, int64_t place_stride, const int64_t* table, int64_t table_stride,       \
                              const int64_t* rows, const int64_t* sequences, const int64_t* contexts, E* output) {          \
        attend_rows(R, Hkv, G, D, B, window, scale, threads, query, query_stride, keys, values, block_stride,               \
                    place_stride, table, table_stride, rows, sequences, contexts, output);                                  \
    }
SERVE(float, float32)
SERVE(bfloat16, bfloat16)
}
