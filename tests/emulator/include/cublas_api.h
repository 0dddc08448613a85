#pragma once

#include "cublasLt.h"
