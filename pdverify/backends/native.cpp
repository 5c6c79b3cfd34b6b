// The sums of native.py.  A row is read in tiles, as R (float or double, the compute dtype) with
// hidden tokens at -inf; terms are added up in R by vector lane, and the lanes in double.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
typedef int64_t Long;
constexpr Long BYTES = __BIGGEST_ALIGNMENT__, TILE = 1024;
typedef double Once __attribute__((vector_size(BYTES)));
typedef double Twice __attribute__((vector_size(2 * BYTES)));
constexpr double INF = HUGE_VAL, LOG2E = 1.4426950408889634, LN2 = 0.6931471805599453;
constexpr double INVERSES[] = {1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040,
    1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
enum { TAIL, FULL, TV };
struct Matrix { void* data; Long stride, bf16; };
struct Task { Matrix z, y, ids, norms, out; Long rows, size, hidden, kernel; };
template <class T> T* at(const Matrix& m, Long row) { return (T*)m.data + row * m.stride; }
double over(double top) { return top == -INF ? 0 : top; }
double rise(double top, double higher) { return top == -INF ? 0 : higher - top; }

template <class R> struct Row {
    typedef std::numeric_limits<R> Limits;
    typedef std::conditional_t<sizeof(R) == 8, int64_t, int32_t> Int;
    typedef std::conditional_t<sizeof(R) == 8, Once, Twice> D;  // a double for each lane
    typedef R V __attribute__((vector_size(BYTES)));
    typedef Int M __attribute__((vector_size(BYTES)));
    static constexpr Long W = BYTES / sizeof(R), STEP = 4 * W;
    static constexpr R NO = -Limits::infinity(), MOST = Limits::max();
    const Task& t;
    Long row;
    alignas(BYTES) R z[TILE], y[TILE];

    template <class X> static X times(X mass, X x) { return mass == 0 ? mass : mass * x; }
    static V shifted(V x, V n) {  // x 2^n, in two factors: 2^n may be subnormal
        M i = __builtin_convertvector(n, M), half = i >> 1, bias = M{} + (Limits::max_exponent - 1);
        constexpr int DIGITS = Limits::digits - 1;
        return x * (V)((half + bias) << DIGITS) * (V)((i - half + bias) << DIGITS);
    }
    static V reduced(V x, V& n) {  // p, e^x = 2^n (1 + p), x < 80: a Taylor sum to |r| = ln 2 / 2
        constexpr R HIGH = R(0.693359375), LOW = R(LN2 - 0.693359375);
        constexpr R LEAST = -Limits::max_exponent, ROUND = R(3ll << (Limits::digits - 2));
        x = x < LEAST ? V{} + LEAST : x;
        n = (x * R(LOG2E) + ROUND) - ROUND;
        V r = (x - n * HIGH) - n * LOW, q{};
#pragma GCC unroll 16
        for (int j = sizeof(R) == 8 ? 13 : 7; j >= 2; j--) q = q * r + R(INVERSES[j]);
        return q * r * r + r;
    }
    static V exp(V x) { V n, p = reduced(x, n); return shifted(1 + p, n); }
    static V& at(R* x, Long i) { return *(V*)(x + i); }
    void read(const Matrix& m, Long start, Long n, R* x) {
        const R* plain = ::at<R>(m, row) + start;
        const uint16_t* bits = ::at<uint16_t>(m, row) + start;
        for (Long i = 0; i < n && !m.bf16; i++) x[i] = plain[i];
        for (Long i = 0; i < n && m.bf16; i++) x[i] = __builtin_bit_cast(float, bits[i] << 16);
        std::fill(x + n, x + std::min(TILE, n + STEP), NO);
    }
    template <class Each> void tiles(Each each) {  // of n logits, then -inf
        const Long *id = ::at<Long>(t.ids, row), *last = id + t.hidden;
        for (Long start = 0; start < t.size; start += TILE) {
            Long n = std::min(TILE, t.size - start);
            read(t.z, start, n, z);
            if (t.kernel != TAIL) read(t.y, start, n, y);
            for (; id < last && *id < start + n; id++) z[*id - start] = y[*id - start] = NO;
            each(n);
        }
    }
    static double largest(const R* x, Long n) {
        R lanes[STEP];  // several vectors, to hide the latency
        std::fill(lanes, lanes + STEP, NO);
        for (Long i = 0; i < n; i += STEP)
            for (Long j = 0; j < STEP; j++) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
        return *std::max_element(lanes, lanes + STEP);
    }
    template <int N, class Terms> static void add(D (&s)[N], Long n, Terms terms) {
        V sum[N] = {};
        for (Long i = 0; i < n; i += W) terms(i, sum);
        for (int i = 0; i < N; i++) s[i] += __builtin_convertvector(sum[i], D);
    }
    void put(Long field, const D* s, Long count) {
        double* out = ::at<double>(t.out, row) + field;
        for (; count--; out++, s++)
            for (Long j = *out = 0; j < W; j++) *out += (*s)[j];
    }
    template <bool BOTH> void moments() {
        enum { S1, S2, S3, M1, X, F, E1, E2 };
        double top_z = -INF, top_y = -INF, *out = ::at<double>(t.out, row);
        D s[8] = {};
        V low{}, high{};  // of the gaps
        tiles([&](Long n) {
            double up_z = largest(z, n), up_y = BOTH ? largest(y, n) : -INF;
            bool top_here = up_z > -INF && up_z >= top_z;
            up_z = std::max(up_z, top_z), up_y = std::max(up_y, top_y);
            if (up_z > top_z || up_y > top_y) {
                double down_z = rise(top_z, up_z), down_y = rise(top_y, up_y), shift = down_y - down_z;
                D a = std::exp(-down_z) + D{}, b = std::exp(-down_y) + D{}, aa = a * a;
                s[F] = times(b, s[F] + shift * s[M1]), s[E1] = times(a, s[E1] + shift * s[S1]);
                s[E2] = times(aa, s[E2] + shift * s[S2]), s[S1] *= a, s[S2] *= aa, s[S3] *= a * aa;
                s[M1] *= b, s[X] *= a * b, top_z = up_z, top_y = up_y;
            }
            R anchor_z = R(over(top_z)), anchor_y = R(over(top_y));
            auto gap = [&](V u, V v) {  // u - v, finite where a mass is 0
                V d = u - v;
                low = d < low ? d : low, high = d > high ? d : high;
                d = d > -MOST ? d : V{} - MOST;
                return d < MOST ? d : V{} + MOST;
            };
            if (top_here) {  // the likeliest token apart, in double: it may dominate
                Long best = std::find(z, z + n, R(top_z)) - z;
                V v = V{} + (y[best] - anchor_y);
                double b = exp(v)[0], d = gap(V{}, v)[0], apart[] = {1, 1, 1, b, b, b * d, d, d};
                for (int i = 0; i < 8; i++) s[i][0] += apart[i];
                z[best] = y[best] = NO;
            }
            add(s, n, [&](Long i, V* sum) {
                V u = at(z, i) - anchor_z, a = exp(u), aa = a * a;
                sum[S1] += a, sum[S2] += aa, sum[S3] += aa * a;
                if (!BOTH) return;
                V v = at(y, i) - anchor_y, d = gap(u, v), b = exp(v), ad = a * d;
                sum[M1] += b, sum[X] += a * b, sum[F] += b * d, sum[E1] += ad, sum[E2] += a * ad;
            });
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
                V u = at(z, i) - top_z, v = at(y, i) - top_y, none{}, power;
                V gap = (u == NO) & (v == NO) ? none : u - v - shift;  // u - v is exact when small
                auto up = gap > 0;
                V p = reduced(up ? -gap : gap, power), scale = shifted(none + 1, power);
                V larger = exp(up ? u - rest_z : v - rest_y), less = larger * (scale * p + scale);
                V pi = up ? larger : less, h = (up ? pi : gap < 0 ? -pi : none) / 2;
                V cell = larger * (scale * p + (scale - 1)) / -2;  // 1 - e^-|gap|
                sum[0] += cell, sum[1] += h, sum[2] += pi * h;
            });
        });
        put(0, s, 3);
    }
    void run() { t.kernel == TAIL ? moments<false>() : t.kernel == FULL ? moments<true>() : tv(); }
};

extern "C" void run(const Task* t, int wide) {
#ifdef __SSE2__  // subnormal moments are slow, and nothing beside 1
    unsigned mode = __builtin_ia32_stmxcsr();
    if (t->kernel <= FULL) __builtin_ia32_ldmxcsr(mode | 0x8040);
#endif
    for (Long row = 0; row < t->rows; row++)
        wide ? Row<double>{*t, row}.run() : Row<float>{*t, row}.run();
#ifdef __SSE2__
    __builtin_ia32_ldmxcsr(mode);
#endif
}
