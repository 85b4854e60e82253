// One gradient step of PPO for policy and critic as two MLPs: forward, loss, backward, clipping, Adam.
// kernel.py builds this file and calls klrl_steps; step.py is the same in torch. Arithmetic is float32 on
// one thread, in a fixed order. No -ffast-math: a NaN in any number reaches the metrics and ends a run.
// Matrices are stored row by row, x[B][D]. A leading dimension ("ld") is the length of a row in memory,
// rounded up to whole vectors; the floats between are 0. A batch is cut into chunks of CHUNK rows, whose
// activations fit into the cache; gradients are sums over chunks.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

// The settings of a run; kernel.py declares the same fields in the same order.
struct Spec {
  int64_t inputs, actions, depth, family, loss, activation, critic, estimator, normalize, sum, samples;
  int64_t parameters, columns, log_std;  // log_std: where in flat
  const int64_t* widths;  // [depth], of the hidden layers
  const int64_t* places;  // [2][depth + 1][2]: where in flat policy's and critic's (weight, bias) start
  int64_t observation, sample, old_log_prob, advantage, value_target, state_value, loc, scale;  // columns
  int64_t ref_log_prob, ref_loc, ref_scale, entropy_noise;                                      // of a row
  double clip_low, clip_high, critic_coeff, clip_value, entropy_bonus, reward_scale, log_half_widths;
  double eps, max_grad_norm, weight_decay;
};

namespace {
enum Family { NORMAL, TANH_NORMAL, CATEGORICAL };
enum Loss { CLIP, KLPEN, TRPO };
enum Activation { TANH, RELU, ELU, NOTHING };
enum Critic { L1, L2, SMOOTH_L1 };
enum Estimator { NONE, EXACT, K1, K2, K3 };

// ------------------------------------------------------------------------------------------- vectors
#if defined(__AVX512F__)  // V floats in a vector; a tile of the product is MR rows of NV vectors, and
constexpr long V = 16, MR = 6, NV = 4;  // its MR * NV sums, with NV + 1 more, fit into the registers
#elif defined(__AVX__)
constexpr long V = 8, MR = 6, NV = 2;
#else
constexpr long V = 4, MR = 6, NV = 4;
#endif
constexpr long NR = NV * V, CHUNK = 256, DEEPEST = 16;  // the last: hidden layers
typedef float Vec __attribute__((vector_size(4 * V)));
typedef float Loose __attribute__((vector_size(4 * V), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * V)));

inline Vec load(const float* p) { return *(const Loose*)p; }
inline void store(float* p, Vec v) { *(Loose*)p = v; }
inline Vec all(float x) { return x - Vec{}; }
inline long up(long n) { return (n + V - 1) / V * V; }
inline float sum(Vec v) {
  for (long half = V / 2; half; half /= 2)
    for (long i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
}

// e^x - 1. With k = round(x / ln 2) and r = x - k ln 2: 2^k (e^r - 1) + (2^k - 1), which loses no digit
// at small x; e^r - 1 by its series, whose first omitted term is r^8 / 8! < 5e-9. x is cut to +-20.
// The comparisons are such that a NaN stays one.
inline Vec expm1_of(Vec x) {
  x = x < -20.f ? all(-20.f) : x;
  x = x > 20.f ? all(20.f) : x;
  const Vec shift = all(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  Vec shifted = x * 1.44269504f + shift, k = shifted - shift, r = x - k * 0.693147181f;
  Vec series = all(1 / 5040.f);
  const float factorials[] = {720, 120, 24, 6, 2, 1};
  for (float factorial : factorials) series = series * r + 1 / factorial;
  Vec two_k = (Vec)(((Bits)shifted << 23) + 0x3f800000);  // by its bits
  return two_k * (series * r) + (two_k - 1.f);
}

// ---------------------------------------------------------------------------------- matrix products
// C[m][n] = (add ? C[m][n] : 0) + sum_k A(m, k) B[k][n], with A(m, k) = A[m * am + k * ak], for M rows
// and W vectors of columns, in tiles of R rows; fewer for the last rows.
template <int R, int W>
void strip(long M, long K, const float* A, long am, long ak, const float* B, long ldb, float* C, long ldc, bool add) {
  for (; M >= R; M -= R, A += R * am, C += R * ldc) {
    Vec c[R][W];
    for (int i = 0; i < R; i++)
      for (int j = 0; j < W; j++) c[i][j] = add ? load(C + i * ldc + j * V) : Vec{};
    const float *a = A, *b = B;
    for (long k = 0; k < K; k++, a += ak, b += ldb) {
      Vec right[W];
      for (int j = 0; j < W; j++) right[j] = load(b + j * V);
      for (int i = 0; i < R; i++) {
        Vec left = all(a[i * am]);
        for (int j = 0; j < W; j++) c[i][j] += left * right[j];
      }
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < W; j++) store(C + i * ldc + j * V, c[i][j]);
  }
  if constexpr (R > 1)
    if (M) strip<R - 1, W>(M, K, A, am, ak, B, ldb, C, ldc, add);
}

// The same for N columns. B is a plain matrix with ``ldb``; or, with ldb = 0, panels of ``pack``.
template <int W = NV>
void product(long M, long N, long K, const float* A, long am, long ak, const float* B, long ldb, float* C, long ldc,
             bool add) {
  constexpr long width = W * V;
  for (; N > width - V; N -= width, C += width, B += ldb ? width : width * K)
    strip<MR, W>(M, K, A, am, ak, B, ldb ? ldb : width, C, ldc, add);
  if constexpr (W > 1)
    if (N > 0) product<W - 1>(M, N, K, A, am, ak, B, ldb, C, ldc, add);
}

// to(k, i) = from(i, k) for up to four rows i and K columns k; of four rows, in blocks of 4 x 4.
void turn(long rows, long K, const float* __restrict__ from, long ld, float* __restrict__ to, long width) {
  long k = 0;
  for (float block[4][4]; rows == 4 && k + 4 <= K; k += 4) {
    for (long i = 0; i < 16; i++) block[i / 4][i % 4] = from[i / 4 * ld + k + i % 4];
    for (long i = 0; i < 16; i++) to[(k + i / 4) * width + i % 4] = block[i % 4][i / 4];
  }
  for (; k < K; k++)
    for (long i = 0; i < rows; i++) to[k * width + i] = from[i * ld + k];
}

// Pack K rows of N columns into panels of NR columns, with 0 after column N. ``from`` has these rows; or,
// if ``turned``, these columns. ld is its leading dimension.
void pack(long K, long N, const float* from, long ld, bool turned, float* to) {
  for (long n = 0; n < N; n += NR) {
    long real = N - n < NR ? N - n : NR, width = up(real);
    float* panel = to + n * K;
    for (long k = 0; k < K && !turned; k++) memcpy(panel + k * width, from + k * ld + n, 4 * real);
    for (long j = 0; j < real && turned; j += 4)
      turn(real - j < 4 ? real - j : 4, K, from + (n + j) * ld, ld, panel + j, width);
    for (long k = 0; k < K && real < width; k++) memset(panel + k * width + real, 0, 4 * (width - real));
  }
}

// -------------------------------------------------------------------------------- forward and backward
// A layer y = f(x W^T + b) with W [out][in], and its place in memory.
struct Layer {
  long in, out, ld_in, ld_out;
  bool turned;  // padded_grad is the gradient of W^T, which has less padding
  const float *weight, *bias;
  float *weight_grad, *bias_grad;  // in the flat gradient
  float *forward, *backward;       // panels of W^T and of W
  float *padded_bias, *padded_grad, *y;  // y is [CHUNK][ld_out]
};

struct Work {
  Layer layers[2][DEEPEST + 1];  // of policy and critic; the last is the head
  float *x, *packed, *delta[2], *gradient;
  float *by_out, *by_log_std;  // [actions][4], see Quantity
  float *log_std, *inverse_std, *old_std, *old_log_std, *log_p, *log_old, *log_ref;  // [actions]
  long size;  // floats in all
};

// Lay out the memory that starts at ``base``; if that is null, only the size is of use.
Work lay_out(const Spec& s, const float* flat, float* base) {
  Work w = {};
  float* next = base;
  auto take = [&](long count) { return std::exchange(next, next + (count + 15) / 16 * 16); };
  w.gradient = take(s.parameters);
  long widest = up(s.inputs);
  for (int net = 0; net < 2; net++) {
    long in = s.inputs;
    for (int l = 0; l <= s.depth; l++) {
      long out = l < s.depth ? s.widths[l] : net ? 1 : s.actions;
      const int64_t* place = s.places + (net * (s.depth + 1) + l) * 2;
      Layer& y = w.layers[net][l];
      y.in = in, y.out = out, y.ld_in = up(in), y.ld_out = up(out);
      y.weight = flat + place[0], y.bias = flat + place[1];
      y.weight_grad = w.gradient + place[0], y.bias_grad = w.gradient + place[1];
      y.forward = take(in * y.ld_out), y.backward = take(out * y.ld_in);
      y.padded_bias = take(y.ld_out), y.y = take(CHUNK * y.ld_out);
      y.turned = 2 * in * y.ld_out < out * y.ld_in;
      y.padded_grad = in == y.ld_in ? y.weight_grad : take(y.turned ? in * y.ld_out : out * y.ld_in);
      widest = widest > y.ld_out ? widest : y.ld_out, in = out;
    }
  }
  w.x = take(CHUNK * up(s.inputs)), w.packed = take(CHUNK * widest);
  for (float*& delta : w.delta) delta = take(CHUNK * widest);
  w.by_out = take(4 * s.actions), w.by_log_std = take(4 * s.actions);
  float** rows[] = {&w.log_std, &w.inverse_std, &w.old_std, &w.old_log_std, &w.log_p, &w.log_old, &w.log_ref};
  for (float** row : rows) *row = take(s.actions);
  return w.size = next - base, w;
}

// h = f(h + b), in place.
void activate(long rows, long ld, float* h, const float* bias, int64_t f) {
  for (long r = 0; r < rows; r++)
    for (long j = 0; j < ld; j += V) {
      Vec x = load(h + r * ld + j) + load(bias + j);
      Vec e = f == TANH ? expm1_of(x + x) : f == ELU ? expm1_of(x) : x;
      if (f == TANH) x = e / (e + 2.f);  // tanh x = (e^2x - 1) / (e^2x + 1)
      if (f == RELU) x = x < 0.f ? Vec{} : x;
      if (f == ELU) x = x > 0.f ? x : e;
      store(h + r * ld + j, x);
    }
}

// d *= f'(x), written by h = f(x).
void times_slope(long count, float* d, const float* h, int64_t f) {
  for (long i = 0; i < count; i += V) {
    Vec y = load(h + i), g = load(d + i);
    if (f == TANH) g *= 1.f - y * y;
    if (f == RELU) g = y <= 0.f ? Vec{} : g;
    if (f == ELU) g = y > 0.f ? g : g * (y + 1.f);
    store(d + i, g);
  }
}

// y = x W^T for few outputs, where a vector would mostly hold padding.
void dots(const Layer& y, long rows, const float* x) {
  for (long r = 0; r < rows; r++, x += y.ld_in)
    for (long n = 0; n < y.out; n++) {
      const float* w = y.weight + n * y.in;
      long j = 0;
      Vec total = {};
      for (; j + V <= y.in; j += V) total += load(x + j) * load(w + j);
      float& result = y.y[r * y.ld_out + n] = sum(total);
      for (; j < y.in; j++) result += x[j] * w[j];
    }
}

void forward(const Spec& s, const Work& w, int net, long rows) {
  const float* x = w.x;
  for (int l = 0; l <= s.depth; l++) {
    const Layer& y = w.layers[net][l];
    if (y.out <= 4) dots(y, rows, x);
    else product(rows, y.out, y.in, x, y.ld_in, 1, y.forward, 0, y.y, y.ld_out, false);
    activate(rows, y.ld_out, y.y, y.padded_bias, l < s.depth ? s.activation : int64_t(NOTHING));
    x = y.y;
  }
}

// The gradient of a layer's weight and bias from d = d loss / d (x W^T + b), [rows][ld_out]: dW = d^T x,
// and db = sum_rows d.
void parameter_gradient(const Work& w, const Layer& y, long rows, const float* d, const float* x, bool add) {
  long out = y.out, in = y.in, ld_out = y.ld_out, ld_in = y.ld_in;
  const float *left = d, *right = x;
  if (y.turned) std::swap(left, right), std::swap(out, in), std::swap(ld_out, ld_in);  // dW^T = x^T d
  if (in > NR) pack(rows, ld_in, right, ld_in, false, w.packed), right = w.packed;  // rows close together
  product(out, in, rows, left, 1, ld_out, right, in > NR ? 0 : ld_in, y.padded_grad, ld_in, add);
  for (long j = 0; j < y.out; j += V) {
    Vec total = {};
    for (long r = 0; r < rows; r++) total += load(d + r * y.ld_out + j);
    for (long i = 0; i < V && j + i < y.out; i++)
      y.bias_grad[j + i] = (add ? y.bias_grad[j + i] : 0.f) + total[i];
  }
}

// Backward from the head, whose output y.y holds d loss / d output.
void backward(const Spec& s, const Work& w, int net, long rows, bool add) {
  const float* d = w.layers[net][s.depth].y;
  for (int l = s.depth; l >= 0; l--) {
    const Layer& y = w.layers[net][l];
    const float* x = l ? w.layers[net][l - 1].y : w.x;
    parameter_gradient(w, y, rows, d, x, add);
    if (!l) break;
    float* below = w.delta[l % 2];  // dx = d W, times f'
    product(rows, y.in, y.out, d, y.ld_out, 1, y.backward, 0, below, y.ld_in, false);
    times_slope(rows * y.ld_in, below, x, s.activation);
    d = below;
  }
}

// ------------------------------------------------------------------------------------------- the loss
// What a policy is scored by in a frame, nats. ``by_out`` and ``by_log_std`` have their derivatives by
// each output of the policy's head and each log_std.
enum Quantity { LOG_PROB, ENTROPY, KL_OLD, KL_REF };  // KL(old||new); KL(new||reference) in closed form

constexpr float HALF_LOG_2PI = 0.918938533f;
float log_slope(float u) {  // log |d tanh(u) / du| = 2 (log 2 - u - log(1 + e^-2u))
  return 2 * (0.693147181f - u - (u < -10 ? -2 * u : log1pf(expf(-2 * u))));
}

// The value before tanh is u, the action low + half_width (tanh(u) + 1). log pi of an action is that of
// u less log |da/du|. The entropy is that of u plus E[log |da/du|], a mean over draws u = m + s noise.
void squash(const Spec& s, const Work& w, const float* row, const float* loc, float* y) {
  float slope = s.log_half_widths, mean = s.log_half_widths;
  for (long i = 0; i < s.actions; i++) {
    slope += log_slope(row[s.sample + i]);
    for (long j = 0; j < s.samples; j++) {
      float move = row[s.entropy_noise + j * s.actions + i] / w.inverse_std[i], u = loc[i] + move;
      mean += log_slope(u) / s.samples;
      float by_u = -2 * tanhf(u) / s.samples;
      w.by_out[4 * i + ENTROPY] += by_u, w.by_log_std[4 * i + ENTROPY] += by_u * move;
    }
  }
  y[LOG_PROB] -= slope, y[ENTROPY] += mean;
}

// A Gaussian a with loc m = the head's outputs and scale s = exp(log_std), independent dimensions.
void score_gaussian(const Spec& s, const Work& w, const float* row, const float* loc, float* y) {
  y[LOG_PROB] = -HALF_LOG_2PI * s.actions, y[ENTROPY] = (0.5f + HALF_LOG_2PI) * s.actions;
  y[KL_OLD] = y[KL_REF] = 0;
  for (long i = 0; i < s.actions; i++) {
    float log_std = w.log_std[i], inverse = w.inverse_std[i], old = row[s.scale + i];
    float *by_m = w.by_out + 4 * i, *by_s = w.by_log_std + 4 * i;
    // log pi = sum -(a - m)^2 / (2 s^2) - log s - log(2 pi) / 2
    float z = (row[s.sample + i] - loc[i]) * inverse;
    y[LOG_PROB] -= log_std + 0.5f * z * z, by_m[LOG_PROB] = z * inverse, by_s[LOG_PROB] = z * z - 1;
    // H = sum log s + log(2 pi e) / 2
    y[ENTROPY] += log_std, by_m[ENTROPY] = 0, by_s[ENTROPY] = 1;
    // KL(p||q) = sum log(sq / sp) + (sp^2 + (mp - mq)^2) / (2 sq^2) - 1/2, for p = old, q = new
    if (!(old == w.old_std[i])) w.old_std[i] = old, w.old_log_std[i] = logf(old);
    float r = old * inverse, m = (row[s.loc + i] - loc[i]) * inverse;
    y[KL_OLD] += 0.5f * (r * r - 1 + m * m) + (log_std - w.old_log_std[i]);
    by_m[KL_OLD] = -m * inverse, by_s[KL_OLD] = 1 - r * r - m * m;
    if (s.estimator != EXACT) continue;
    float ref = row[s.ref_scale + i];  // the same for p = new, q = reference
    r = 1 / (inverse * ref), m = (loc[i] - row[s.ref_loc + i]) / ref;
    y[KL_REF] += 0.5f * (r * r - 1 + m * m) + (logf(ref) - log_std);
    by_m[KL_REF] = m / ref, by_s[KL_REF] = r * r - 1;
  }
  if (s.family == TANH_NORMAL) squash(s, w, row, loc, y);
}

void log_softmax(long count, const float* logits, float* out) {
  float most = logits[0], total = 0;
  for (long i = 1; i < count; i++) most = logits[i] > most ? logits[i] : most;
  for (long i = 0; i < count; i++) total += expf(logits[i] - most);
  for (long i = 0; i < count; i++) out[i] = logits[i] - most - logf(total);
}

// One of K actions, p = softmax(logits).
void score_categorical(const Spec& s, const Work& w, const float* row, const float* logits, float* y) {
  log_softmax(s.actions, logits, w.log_p);
  log_softmax(s.actions, row + s.loc, w.log_old);
  if (s.estimator == EXACT) log_softmax(s.actions, row + s.ref_loc, w.log_ref);
  long taken = long(row[s.sample]);
  y[LOG_PROB] = w.log_p[taken], y[ENTROPY] = y[KL_OLD] = y[KL_REF] = 0;
  for (long i = 0; i < s.actions; i++) {
    float p = expf(w.log_p[i]), old = expf(w.log_old[i]), *by = w.by_out + 4 * i;
    y[ENTROPY] -= p * w.log_p[i];
    y[KL_OLD] += old * (w.log_old[i] - w.log_p[i]);
    y[KL_REF] += s.estimator == EXACT ? p * (w.log_p[i] - w.log_ref[i]) : 0;
    by[LOG_PROB] = (i == taken) - p, by[KL_OLD] = p - old;
  }
  for (long i = 0; i < s.actions; i++) {
    float p = expf(w.log_p[i]), *by = w.by_out + 4 * i;
    by[ENTROPY] = -p * (w.log_p[i] + y[ENTROPY]);
    by[KL_REF] = s.estimator == EXACT ? p * (w.log_p[i] - w.log_ref[i] - y[KL_REF]) : 0;
  }
}

// The distance of a value from its target, and its derivative by the value.
float distance(int64_t kind, float value, float target, float& slope) {
  float d = value - target, size = fabsf(d), sign = d > 0 ? 1 : d < 0 ? -1 : d;
  if (kind == L2) return slope = 2 * d, d * d;
  if (kind == SMOOTH_L1 && size < 1) return slope = d, 0.5f * d * d;
  return slope = sign, kind == L1 ? size : size - 0.5f;
}

// The larger of the distances of V and of V cut to within clip_value of the old V.
float critic_loss(const Spec& s, float value, float target, float old_value, float& slope) {
  float loss = distance(s.critic, value, target, slope), most = s.clip_value, move = value - old_value, none;
  if (most == 0) return loss;  // without a limit
  float near = old_value + (move < -most ? -most : move > most ? most : move);
  float cut = distance(s.critic, near, target, none);
  if (cut > loss && fabsf(move) > most) slope = 0;
  return cut <= loss ? loss : cut;
}

// KL(new||ref) of a frame from its action: w k(r) with w = pi / pi_old and r = log pi - log pi_ref, and
// its derivative by log pi. k2 takes w as a constant.
float sampled_ref(int64_t estimator, float w, float r, float& slope) {
  if (estimator == K1) return slope = w * (r + 1), w * r;
  if (estimator == K2) return slope = w * r, w * 0.5f * r * r;
  float k3 = expm1f(-r) + r;
  return slope = w * (k3 - expm1f(-r)), w * k3;
}

// Mean and the standard deviation that the advantages are divided by, at least 1e-6; and the one that a
// KL is divided by.
struct Advantages {
  float mean = 0, std = 1, spread = 1;
  Advantages(const Spec& s, const float* rows, long count) {
    if (!s.normalize) return;
    double total = 0, squares = 0;
    for (long b = 0; b < count; b++) total += rows[b * s.columns + s.advantage];
    for (long b = 0; b < count; b++) squares += pow(rows[b * s.columns + s.advantage] - total / count, 2);
    mean = total / count, std = sqrt(squares / (count - 1));
    spread = std > 1e-6f ? std : 1, std = std < 1e-6f ? 1e-6f : std;
  }
};

struct Totals { double objective, critic, entropy, kl_ref, kl_old; };  // sums over frames

// Losses of a chunk. The outputs of both heads are replaced by the loss's derivatives by them.
void losses(const Spec& s, const Work& w, const float* rows, long count, const Advantages& a, float weight,
            float beta, float kl_coef, Totals& t) {
  const Layer &policy = w.layers[0][s.depth], &critic = w.layers[1][s.depth];
  float charge = s.estimator ? s.reward_scale / a.spread : 0, y[4], by_value;
  for (long b = 0; b < count; b++) {
    const float* row = rows + b * s.columns;
    float *out = policy.y + b * policy.ld_out, *value = critic.y + b * critic.ld_out;
    (s.family == CATEGORICAL ? score_categorical : score_gaussian)(s, w, row, out, y);
    float ratio = expf(y[LOG_PROB] - row[s.old_log_prob]), advantage = (row[s.advantage] - a.mean) / a.std;
    // The gain, w A, min(w A, clip(w) A) or w A - beta KL(old||new), and the derivatives of the sum that
    // is maximised: gain + entropy_bonus H - kl_coef KL(new||reference).
    float gain = ratio * advantage, by[4] = {gain, float(s.entropy_bonus), 0, 0};
    if (s.loss == CLIP) {
      float low = s.clip_low, high = s.clip_high;
      float clipped = (ratio < low ? low : ratio > high ? high : ratio) * advantage;
      if (clipped < gain) gain = clipped, by[LOG_PROB] = 0;
    }
    if (s.loss == KLPEN) gain -= beta * y[KL_OLD], by[KL_OLD] = -beta;
    if (s.estimator) {
      float by_log_prob = 0, r = y[LOG_PROB] - row[s.ref_log_prob];
      float kl = s.estimator == EXACT ? y[KL_REF] : sampled_ref(s.estimator, ratio, r, by_log_prob);
      by[LOG_PROB] -= kl_coef * charge * by_log_prob, by[KL_REF] = -kl_coef * charge;
      t.kl_ref += kl * charge;
    }
    t.critic += critic_loss(s, value[0], row[s.value_target], row[s.state_value], by_value);
    t.objective += gain, t.entropy += y[ENTROPY], t.kl_old += y[KL_OLD];
    value[0] = weight * float(s.critic_coeff) * by_value;
    for (long i = 0; i < s.actions; i++) {
      float by_out = 0, by_log_std = 0;
      for (int q = 0; q < 4; q++)
        by_out += by[q] * w.by_out[4 * i + q], by_log_std += by[q] * w.by_log_std[4 * i + q];
      out[i] = -weight * by_out;
      if (s.family != CATEGORICAL) w.gradient[s.log_std + i] -= weight * by_log_std;
    }
  }
}

// -------------------------------------------------------------------------------------- the optimiser
// Adam (Kingma and Ba 2015, algorithm 1) on the gradient cut to the norm ``max_grad_norm``; with a
// weight decay, AdamW (Loshchilov and Hutter 2019). Returns the norm before.
float adam(const Spec& s, const float* gradient, float* __restrict__ flat, float* __restrict__ exp_avg,
           float* __restrict__ exp_avg_sq, float* count, float lr) {
  Vec squares = {};
  for (long i = 0; i < s.parameters; i += V) squares += load(gradient + i) * load(gradient + i);  // then 0
  float norm = sqrtf(sum(squares)), cut = s.max_grad_norm / (norm + 1e-6f);
  cut = cut > 1 ? 1 : cut;
  *count += 1;
  float mean = -1 / expm1(*count * log(0.9)), spread = -1 / expm1(*count * log(0.999));  // 1 - b^t would cancel
  float keep = 1 - lr * s.weight_decay, eps = s.eps;
  for (long i = 0; i < s.parameters; i++) {
    float g = gradient[i] * cut;
    float m = 0.9f * exp_avg[i] + 0.1f * g, v = 0.999f * exp_avg_sq[i] + 0.001f * g * g;
    exp_avg[i] = m, exp_avg_sq[i] = v;
    flat[i] = keep * flat[i] - lr * (m * mean) / (sqrtf(v * spread) + eps);
  }
  return norm;
}

// Prepare what is the same for all chunks: panels of the weights, padded biases, scales.
void prepare(const Spec& s, const Work& w, const float* flat) {
  for (int net = 0; net < 2; net++)
    for (int l = 0; l <= s.depth; l++) {
      const Layer& y = w.layers[net][l];
      pack(y.in, y.out, y.weight, y.in, true, y.forward);
      if (l) pack(y.out, y.in, y.weight, y.in, false, y.backward);
      memcpy(y.padded_bias, y.bias, 4 * y.out);
    }
  for (long i = 0; i < s.actions && s.family != CATEGORICAL; i++) {
    w.log_std[i] = flat[s.log_std + i], w.inverse_std[i] = expf(-w.log_std[i]);
    w.gradient[s.log_std + i] = 0;
  }
}

// Move the gradients of padded or turned weights to the flat gradient.
void collect(const Spec& s, const Work& w, int net) {
  for (int l = 0; l <= s.depth; l++) {
    const Layer& y = w.layers[net][l];
    for (long r = 0; r < y.out && y.padded_grad != y.weight_grad; r++)
      for (long i = 0; i < y.in; i++)
        y.weight_grad[r * y.in + i] = y.padded_grad[y.turned ? i * y.ld_out + r : r * y.ld_in + i];
  }
}

}  // namespace

// Floats of memory that a step needs; they are 0 at the first step, and kept between steps. -1 if the
// caller's Spec has another size.
extern "C" int64_t klrl_memory(const Spec& s, int64_t n) { return n == sizeof(Spec) ? lay_out(s, 0, 0).size : -1; }

// A step as in step.py on each ``size`` of the rows, the last of which may have fewer. Metrics [steps][M] in the
// order of PolicyLoss.measures, then the norm. The last gradient [P] is at the start of ``memory``.
extern "C" void klrl_steps(const Spec& s, float* memory, float* flat, float* exp_avg, float* exp_avg_sq, float* count,
                           const float* rows, int64_t left, int64_t size, const float* coefficients, float* metrics) {
  Work w = lay_out(s, flat, memory);
  int first_net = s.loss == TRPO;  // then gradient steps train the critic alone
  for (long batch; left > 0; left -= batch, rows += batch * s.columns) {
    batch = left < size ? left : size;
    prepare(s, w, flat);
    Advantages advantages(s, rows, batch);
    Totals t = {};
    float weight = s.sum ? 1.f : 1.f / batch;
    for (long first = 0; first < batch; first += CHUNK) {
      long n = batch - first < CHUNK ? batch - first : CHUNK;
      const float* chunk = rows + first * s.columns;
      for (long b = 0; b < n; b++)
        memcpy(w.x + b * up(s.inputs), chunk + b * s.columns + s.observation, 4 * s.inputs);
      for (int net = 0; net < 2; net++) forward(s, w, net, n);
      losses(s, w, chunk, n, advantages, weight, coefficients[1], coefficients[2], t);
      for (int net = first_net; net < 2; net++) backward(s, w, net, n, first > 0);
    }
    for (int net = first_net; net < 2; net++) collect(s, w, net);
    if (first_net && s.family != CATEGORICAL) memset(w.gradient + s.log_std, 0, 4 * s.actions);
    double charged = s.sum ? 1 : 1. / batch;  // the loss's terms are reduced as the loss is
    *metrics++ = t.objective * charged, *metrics++ = t.critic * charged, *metrics++ = t.entropy * charged;
    if (s.estimator) *metrics++ = t.kl_ref * charged;
    *metrics++ = t.kl_old / batch, *metrics++ = t.entropy / batch;
    *metrics++ = adam(s, w.gradient, flat, exp_avg, exp_avg_sq, count, coefficients[0]);
  }
}
