#pragma once

#include "rung.h"

/// Four numbers in one access: of rows that begin at multiples of 16 bytes.
namespace usp::ladder {

/// Columns `column` to +3 of a row; zeros beyond its end.
__device__ inline float4 load_four(const float* row, int column, int columns) {
  if (column + 4 <= columns) return *reinterpret_cast<const float4*>(row + column);
  float4 x = make_float4(0, 0, 0, 0);
  if (column < columns) x.x = row[column];
  if (column + 1 < columns) x.y = row[column + 1];
  if (column + 2 < columns) x.z = row[column + 2];
  return x;
}

/// c's row, from this column on, but for what lies outside.
__device__ inline void store_four(const Product<float>& p, int row, int column, float (&x)[4]) {
  if (row >= p.m) return;
  float* const to = p.c + int64_t{row} * p.c_pitch + column;
  if (column + 4 <= p.n) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
  if (column < p.n) to[0] = x[0];
  if (column + 1 < p.n) to[1] = x[1];
  if (column + 2 < p.n) to[2] = x[2];
}

/// Four products of one number.
__device__ inline void add_scaled(float (&sums)[4], float a, float4 x) {
  sums[0] += a * x.x;
  sums[1] += a * x.y;
  sums[2] += a * x.z;
  sums[3] += a * x.w;
}

}  // namespace usp::ladder
