#pragma once

// Catch2 as Debian 12 packages it (v2), or as newer distributions do (v3).
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_test_macros.hpp>
#else
#include <catch2/catch.hpp>
#endif
