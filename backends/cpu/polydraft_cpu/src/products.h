// What the sources of products share: a row of a buffer, and the way of a vector of sums into memory.
//
// Included behind vec.h, once a processor level as that is.

template <class T>
PD_INLINE T* at(const Any& a, int64_t row) { return reinterpret_cast<T*>(a.p) + row * a.d[1]; }
PD_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
PD_INLINE const float* vector_of(const Weight* w) { return static_cast<const float*>(w->data); }

// The sums of outputs `o` to `o + L` of a row, as far as there are so many: scaled, with their bias, and stored.
PD_INLINE void finish_vector(const Linear& a, int64_t row, int64_t o, vf sums) {
  const int64_t count = a.weight->rows - o;
  if (a.weight->scale) sums = sums * load(a.weight->scale + o, count);
  if (a.bias) sums = sums + load(vector_of(a.bias) + o, count);
  if (a.out.dtype == BF16) store(at<bf16>(a.out, row) + o, sums, count);
  else store(at<float>(a.out, row) + o, sums, count);
}
