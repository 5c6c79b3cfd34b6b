// The sums of native.py.  A row is read in tiles, as R (float or double, the compute dtype) with
// hidden tokens at -inf; terms are added up in R by vector lane, and the lanes in double.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <future>
#include <limits>
#include <vector>
typedef int64_t Long;
constexpr Long BYTES = __BIGGEST_ALIGNMENT__, TILE = 1024;
typedef double Once __attribute__((vector_size(BYTES)));
typedef double Twice __attribute__((vector_size(2 * BYTES)));
constexpr double INF = HUGE_VAL, LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;
// (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, by powers of r: minimax for float, Taylor for double
constexpr double NARROW[] = {0.49999994, 0.16666521, 0.041668389, 0.0083687240, 0.0013814585};
constexpr double WIDE[] = {1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320,
    1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
enum { TAIL, FULL, TV };
struct Matrix { void* data; Long stride, bf16; };
struct Task { Matrix z, y, ids, norms, out; Long rows, size, hidden, kernel; };
template <class T> T* at(const Matrix& m, Long row) { return (T*)m.data + row * m.stride; }
double over(double top) { return top == -INF ? 0 : top; }
double rise(double top, double higher) { return top == -INF ? 0 : higher - top; }

template <class R> struct Row {
    static constexpr bool DOUBLE = sizeof(R) == 8;
    typedef std::conditional_t<DOUBLE, Once, Twice> D;  // a double for each lane
    typedef R V __attribute__((vector_size(BYTES)));
    typedef decltype(V{} < V{}) M;  // integers
    static constexpr Long W = BYTES / sizeof(R), STEP = 4 * W, DIGITS = DOUBLE ? 52 : 23;
    static constexpr R NO = -INF, MOST = std::numeric_limits<R>::max(), LEAST = DOUBLE ? -708 : -87;
    const Task& t;
    Long row;
    const R *ahead_z, *ahead_y;  // where the tile after the next is read from
    alignas(BYTES) R z[TILE], y[TILE];
    template <class X> static X times(X mass, X x) { return mass == 0 ? mass : mass * x; }
    static V larger(V a, V b) { return a > b ? a : b; }
    struct Power { V p; M n; };  // e^x = 2^n (1 + p); n in the place of an exponent
    static Power reduced(V x) {  // x < 80
        constexpr R HIGH = 0.693359375, LOW = LN2 - HIGH, ROUND = 1.5 * (1ll << DIGITS);
        x = x < LEAST ? V{} + LEAST : x;
        V raised = x * R(LOG2E) + ROUND, n = raised - ROUND, r = (x - n * HIGH) - n * LOW;
        V q = V{} + R(DOUBLE ? WIDE[11] : NARROW[4]);
        for (int j = DOUBLE ? 10 : 3; j >= 0; j--) q = q * r + R((DOUBLE ? WIDE : NARROW)[j]);
        return {(q * r + 1) * r, (M)raised << DIGITS};
    }
    static V exp(V x) {
        auto [p, n] = reduced(x);
        return x < LEAST ? V{} : (V)((M)(1 + p) + n);
    }
    static V& at(R* x, Long i) { return *(V*)(x + i); }
    const R* read(const Matrix& m, Long start, Long n, R* x) {
        const R* plain = ::at<R>(m, row) + start;
        const uint16_t* bits = ::at<uint16_t>(m, row) + start;
        for (Long i = 0; i < n && !m.bf16; i++) x[i] = plain[i];
        for (Long i = 0; i < n && m.bf16; i++) x[i] = __builtin_bit_cast(float, bits[i] << 16);
        std::fill(x + n, x + std::min(TILE, n + STEP), NO);
        return m.bf16 ? (const R*)(bits + 2 * TILE) : plain + 2 * TILE;
    }
    template <class Each> void tiles(Each each) {  // of n logits, then -inf
        const Long *id = ::at<Long>(t.ids, row), *last = id + t.hidden;
        for (Long start = 0; start < t.size; start += TILE) {
            Long n = std::min(TILE, t.size - start);
            ahead_y = ahead_z = read(t.z, start, n, z);
            if (t.kernel != TAIL) ahead_y = read(t.y, start, n, y);
            for (; id < last && *id < start + n; id++) z[*id - start] = y[*id - start] = NO;
            each(n);
        }
    }
    static double largest(R* x, Long n) {
        V none = V{} + NO, most[4] = {none, none, none, none};  // several, to hide the latency
        for (Long i = 0; i < n; i += STEP)
            for (Long j = 0; j < 4; j++) most[j] = larger(at(x, i + j * W), most[j]);
        most[0] = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        return *std::max_element((R*)most, (R*)(most + 1));
    }
    template <int N, class Terms> bool add(D (&s)[N], Long n, Terms terms, int finite = -1) {
        V sum[N] = {};
        for (Long i = 0; i < n; i += W)
            terms(i, sum), __builtin_prefetch(ahead_z + i), __builtin_prefetch(ahead_y + i);
        for (Long j = 0; j < W && finite >= 0; j++)
            if (!std::isfinite(sum[finite][j])) return false;
        for (int i = 0; i < N; i++) s[i] += __builtin_convertvector(sum[i], D);
        return true;
    }
    void put(Long field, const D* s, Long count) {
        double* out = ::at<double>(t.out, row) + field;
        for (Long i = 0; i < count * W; i++) out[i / W] += s[i / W][i % W];
    }
    template <bool BOTH> void moments() {
        enum { S1, S2, S3, M1, X, F, E1, E2 };
        double top_z = -INF, top_y = -INF, *out = ::at<double>(t.out, row);
        D s[8] = {};
        V low{}, high{};  // of the gaps
        tiles([&](Long n) {
            double up_z = largest(z, n), up_y = BOTH ? largest(y, n) : -INF;
            bool careful = up_z >= top_z, top_here = careful && up_z > -INF;
            if (up_z > top_z || up_y > top_y) {
                up_z = std::max(up_z, top_z), up_y = std::max(up_y, top_y);
                double down_z = rise(top_z, up_z), down_y = rise(top_y, up_y), shift = down_y - down_z;
                D a = std::exp(-down_z) + D{}, b = std::exp(-down_y) + D{}, aa = a * a;
                s[F] = times(b, s[F] + shift * s[M1]), s[E1] = times(a, s[E1] + shift * s[S1]);
                s[E2] = times(aa, s[E2] + shift * s[S2]), s[S1] *= a, s[S2] *= aa, s[S3] *= a * aa;
                s[M1] *= b, s[X] *= a * b, top_z = up_z, top_y = up_y;
            }
            R anchor_z = R(over(top_z)), anchor_y = R(over(top_y));
            auto gap = [&](V u, V v) {  // u - v, finite where a mass is 0
                V d = u - v, most = larger(d, V{} - MOST);
                low = d < low ? d : low, high = larger(d, high);
                return most < MOST ? most : V{} + MOST;
            };
            if (top_here) {  // the likeliest token apart, in double: it may dominate
                Long best = std::find(z, z + n, R(top_z)) - z;
                V v = V{} + (y[best] - anchor_y);
                double b = exp(v)[0], d = gap(V{}, v)[0], apart[] = {1, 1, 1, b, b, b * d, d, d};
                for (int i = 0; i < 8; i++) s[i][0] += apart[i];
                z[best] = y[best] = NO;
            }
            auto terms = [&](Long i, V* sum) {
                V u = at(z, i) - anchor_z, a = exp(u), aa = a * a;
                sum[S1] += a, sum[S2] += aa, sum[S3] += aa * a;
                if (!BOTH) return;
                V v = at(y, i) - anchor_y, b = exp(v), d = careful ? gap(u, v) : u - v, ad = a * d;
                sum[M1] += b, sum[X] += a * b, sum[F] += b * d, sum[E1] += ad, sum[E2] += a * ad;
            };
            while (!add(s, n, terms, careful ? -1 : F)) careful = true;  // a gap to or from -inf
        });
        out[0] = over(top_z), put(1, s, 3);
        if (!BOTH) return;
        out[4] = over(top_y), put(5, s + 3, 5);
        for (Long j = 0; j < W; j++) {  // a token without mass in one policy alone
            if (low[j] == NO) out[7] = -INF;
            if (high[j] == -NO) out[8] = out[9] = INF;
        }
    }
    void tv() {
        const double* norms = ::at<double>(t.norms, row);
        R top_z = norms[0], rest_z = norms[1], top_y = norms[2], rest_y = norms[3];
        R shift = norms[1] - norms[3];
        D s[3]{};
        tiles([&](Long n) {
            add(s, n, [&](Long i, V* sum) {
                V u = at(z, i) - top_z, v = at(y, i) - top_y, none{};
                V gap = (u == NO) & (v == NO) ? none : u - v - shift;  // u - v is exact when small
                auto up = gap > 0;
                auto [p, n] = reduced(up ? -gap : gap);
                V scale = (V)((M)(none + 1) + n), more = exp(up ? u - rest_z : v - rest_y);
                V pi = up ? more : more * (scale * p + scale), h = (up ? pi : gap < 0 ? -pi : none) / 2;
                V cell = more * (scale * p + (scale - 1)) / -2;  // 1 - e^-|gap|
                sum[0] += cell, sum[1] += h, sum[2] += pi * h;
            });
        });
        put(0, s, 3);
    }
    void run() { t.kernel == TAIL ? moments<false>() : t.kernel == FULL ? moments<true>() : tv(); }
};

extern "C" void run(const Task* t, int wide, int threads) {
    std::atomic<Long> next{0};
    auto work = [&] {
#ifdef __SSE2__  // subnormal terms are slow, and nothing beside 1
        __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
        for (Long row; (row = next++) < t->rows;)
            wide ? Row<double>{*t, row}.run() : Row<float>{*t, row}.run();
    };
    std::vector<std::future<void>> workers(threads);
    for (auto& worker : workers) worker = std::async(work);
    for (auto& worker : workers) worker.wait();
}
